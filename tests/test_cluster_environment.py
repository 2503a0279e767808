"""Whether a process looks for others, and which GPUs it takes."""

import pytest

from dist_ens.ground.errors import UserError
from dist_ens.processes.cluster_environment import (
    chosen_gpus,
    detection_method,
    is_in_cluster,
    num_tasks_left_out,
    visible_gpus,
)

pytestmark = pytest.mark.quick

# The variables of a task that srun starts: task 2 of 4, the first of two on the second node.
SLURM = {
    **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
    **{"SLURM_STEP_NODELIST": "n1,n2", "SLURM_STEP_NUM_TASKS": "4"},
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "is_in", "left_out"),
    [
        ({}, False, 0),
        (SLURM, True, 0),
        (OMPI, True, 0),
        ({"TPU_ML_PLATFORM": "JAX"}, True, 0),
        (BATCH, False, 4),  # A batch script without srun.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, False, 4),  # A shell of salloc.
        (BATCH | {"SLURM_NTASKS": "1"}, False, 0),
        ({"SLURM_JOB_ID": "7"}, False, 0),  # A shell of ssh in a job.
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, 0),  # A notebook in a pod.
    ],
)
def test_a_process_looks_for_others_where_a_launcher_started_them(environ, is_in, left_out):
    assert is_in_cluster(environ) is is_in
    assert num_tasks_left_out(environ) == left_out


def test_openmpi_5_is_asked_through_mpi4py():
    old = OMPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:1"}
    assert [detection_method(each) for each in (OMPI, old, SLURM)] == ["mpi4py", None, None]


@pytest.mark.parametrize(
    ("environ", "visible", "chosen"),
    [
        ({}, 4, None),
        (SLURM, 0, None),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "3"}, 4, None),
        (SLURM, 2, [0]),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4"}, 4, [2, 3]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, 4, [0, 1, 2, 3]),
        # With --gpus-per-task, each of the two tasks sees its own.
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "2"}, 1, [0]),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4"}, 2, [0, 1]),
        (OMPI, 2, [1]),
        (OMPI | {"CUDA_VISIBLE_DEVICES": "1"}, 1, [0]),
    ],
)
def test_the_processes_of_a_machine_divide_its_gpus(environ, visible, chosen):
    assert chosen_gpus(environ, visible) == chosen


@pytest.mark.parametrize(("environ", "visible"), [(OMPI, 3), (OMPI, 1), (SLURM, 1)])
def test_gpus_that_do_not_divide_are_refused(environ, visible):
    with pytest.raises(UserError, match=f"^The {visible} GPUs? of .* over its 2 processes"):
        chosen_gpus(environ, visible)


def test_only_gpus_that_jax_would_use_are_counted(monkeypatch):
    class Plugin:
        name = "xla_cuda12"

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Plugin])
    for platforms, count in (("", 2), ("cuda,cpu", 2), ("cpu", 0)):
        environ = {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": "0,GPU-8f"}
        assert visible_gpus(environ) == count
