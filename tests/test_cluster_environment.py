"""Environments of clusters, whole and in part, against JAX's own classes."""

import os
import subprocess
import sys
import time
import zlib

import pytest
from jax._src import clusters
from jax._src.clusters import cloud_tpu_cluster, cluster

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.cluster_environment import (
    chosen_by_flags,
    chosen_gpus,
    detect,
    initialize_arguments,
    local_devices,
    num_gpus,
    visible_gpus,
)
from dist_ens.errors import UserError

pytestmark = pytest.mark.quick

# The variables of a task that srun starts: task 2 of 4, the first of two on the second node.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1,n2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
URI = "OMPI_MCA_orte_hnp_uri"
ONE_MACHINE = OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-n1-5@1"}
TPU = {"TPU_ML_PLATFORM": "JAX"}
GKE = TPU | {"TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2", "TPU_WORKER_ID": "1"}
SLICES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.9:1234",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_TASK_ID": "sky-1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
# Port of a Slurm job: 61440 + job % 4096.
SLURM_PORT = 61440 + 7

# Environment, then cluster, processes, own number, tasks here, local number, and process 0.
SAME_AS_JAX = {
    "two nodes": (SLURM, "slurm", 4, 2, 2, 0, f"n1:{SLURM_PORT}"),
    "a large job": (
        SLURM | {"SLURM_JOB_ID": "8193"},
        *("slurm", 4, 2, 2, 0, f"n1:{61440 + 1}"),
    ),
    "a range of nodes": (
        SLURM | {"SLURM_STEP_NODELIST": "node[001-004,7],x"},
        *("slurm", 4, 2, 2, 0, f"node001:{SLURM_PORT}"),
    ),
    "a list of nodes in brackets": (
        SLURM | {"SLURM_STEP_NODELIST": "tux-[03,07]"},
        *("slurm", 4, 2, 2, 0, f"tux-03:{SLURM_PORT}"),
    ),
    "one node": (
        SLURM
        | {"SLURM_STEP_NODELIST": "n1", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
        # Without the tasks per node, all tasks of one node are here.
        | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": ""},
        *("slurm", 4, 2, 4, 2, f"n1:{SLURM_PORT}"),
    ),
    "nodes with different numbers of tasks": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3"},
        *("slurm", 4, 3, 1, 0, f"n1:{SLURM_PORT}"),
    ),
    "one task": (
        SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        *("slurm", 1, 0, 2, 0, f"n1:{SLURM_PORT}"),
    ),
    "the fewest variables of JAX": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2"}
        | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        *("slurm", 2, 1, None, 1, f"n1:{SLURM_PORT}"),
    ),
    "a port of the user": (
        SLURM | {"JAX_COORDINATOR_PORT": "1234"},
        *("slurm", 4, 2, 2, 0, "n1:1234"),
    ),
    "slurm before a pod": (SLURM | POD, "slurm", 4, 2, 2, 0, f"n1:{SLURM_PORT}"),
    "openmpi 4": (
        # 61440 + (1531576320 // 4096) % 4096; 1531576320 // 4096 = 373920 = 91 * 4096 + 1184
        OMPI | {URI: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
        *("openmpi", 4, 3, 2, 1, f"10.96.0.1:{61440 + 1184}"),
    ),
    "openmpi 4 over IPv6": (
        # 1314521088 // 4096 = 320928 = 78 * 4096 + 1440
        OMPI | {URI: "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},
        *("openmpi", 4, 3, 2, 1, f"fe80::b9b:{61440 + 1440}"),
    ),
    "openmpi before slurm": (
        SLURM | OMPI | {URI: "4096.0;tcp://10.0.0.1:1"},
        *("openmpi", 4, 3, 2, 1, f"10.0.0.1:{61440 + 1}"),
    ),
    "a port of the user under openmpi": (
        OMPI | {URI: "4096.0;tcp://10.0.0.1:1", "JAX_COORDINATOR_PORT": "99"},
        *("openmpi", 4, 3, 2, 1, "10.0.0.1:99"),
    ),
    "a slice": (GKE, "gke_tpu", 2, 1, 1, 0, "127.0.0.1:8482"),
    "a slice of one host": (
        TPU | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        *("gke_tpu", 1, 0, 1, 0, "localhost:8482"),
    ),
    "addresses with ports": (
        GKE | {"TPU_PROCESS_ADDRESSES": "127.0.0.3:8476,127.0.0.4:8476"},
        *("gke_tpu", 2, 1, 1, 0, "127.0.0.3:8482"),
    ),
    # The second host of the second slice: 1 * 2 + 1.
    "two slices": (GKE | SLICES, "gke_tpu", 4, 3, 1, 0, "127.0.0.9:8482"),
    "the first of two slices": (
        GKE | SLICES | {"MEGASCALE_SLICE_ID": "0"},
        *("gke_tpu", 4, 1, 1, 0, "127.0.0.9:8482"),
    ),
    "nothing": ({}, "none", None, None, None, None, None),
    "a batch script of one task": (
        BATCH | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
        *("none", None, None, None, None, None),
    ),
    "a shell of ssh in a job": ({"SLURM_JOB_ID": "7"}, "none", None, None, None, None, None),
    "slices without a TPU": (SLICES, "none", None, None, None, None, None),
    "one node of SkyPilot": (
        SKYPILOT | {"SKYPILOT_NUM_NODES": "1"},
        *("none", None, None, None, None, None),
    ),
}
# JAX knows nothing of these, or asks a server.
OWN = {
    "openmpi 5 on one machine": (
        ONE_MACHINE,
        *("openmpi", 4, 3, 4, 1),
        f"127.0.0.1:{61440 + zlib.crc32(b'prterun-n1-5@1') % 4096}",
    ),
    "openmpi 5 on two machines": (
        OMPI | {"PMIX_NAMESPACE": "prterun-n1-5@1"},
        *("openmpi", 4, 3, 2, 1, None),
    ),
    "skypilot": (
        SKYPILOT,
        *("skypilot", 2, 1, 1, 0, f"10.0.0.1:{61440 + zlib.crc32(b'sky-1') % 4096}"),
    ),
    "a port of the user under skypilot": (
        SKYPILOT | {"JAX_COORDINATOR_PORT": "1234"},
        *("skypilot", 2, 1, 1, 0, "10.0.0.1:1234"),
    ),
    "an address of the user": (
        SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.7:5"},
        *("slurm", 4, 2, 2, 0, "10.0.0.7:5"),
    ),
    "a TPU machine": (TPU, "gce_tpu", None, None, None, None, None),
    "a TPU machine that asks no server": (
        TPU | {"TPU_SKIP_MDS_QUERY": "1"},
        *("none", None, None, None, None, None),
    ),
    "a pod of an indexed Job": (POD, "kubernetes", None, 0, None, None, None),
    "a pod of no indexed Job": (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        *("none", None, None, None, None, None),
    ),
}
IN_PART = {
    "a batch script without srun": (BATCH | {"SLURM_NTASKS": "4"}, "has SLURM_NTASKS=4, and the"),
    "a batch script without srun on two nodes": (
        BATCH | {"SLURM_NNODES": "2"},
        "^The Slurm job '7' has SLURM_NNODES=2, and the command was not started by srun: "
        "SLURM_STEP_NODELIST and SLURM_NTASKS are missing, as in a batch script",
    ),
    "a shell of salloc": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"},
        "was not started by srun: SLURM_STEP_NODELIST, SLURM_PROCID and SLURM_LOCALID are missing",
    ),
    "a shell of salloc in a step": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        "has SLURM_NTASKS=4, and its step has SLURM_STEP_NUM_TASKS='1', as in a shell of salloc",
    ),
    "an editor in a step": (
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
        "part of the variables of a Slurm step is set in job '7': SLURM_STEP_NODELIST, "
        "SLURM_PROCID and SLURM_LOCALID are missing, as in a shell of ssh or an editor",
    ),
    "a task of a larger job": (
        SLURM | {"SLURM_PROCID": "4"},
        "^SLURM_PROCID=4 is not one of SLURM_NTASKS=4 processes",
    ),
    "a number that is none": (
        SLURM | {"SLURM_PROCID": "two"},
        "^SLURM_PROCID='two' is not a whole number",
    ),
    "a part of openmpi": (
        {"OMPI_COMM_WORLD_RANK": "0"},
        "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK are missing",
    ),
    "the address of openmpi alone": ({URI: "4096.0;tcp://10.0.0.1:1"}, "part of the variables of"),
    "openmpi 5 on two machines without mpi4py": (OMPI, "Install mpi4py, which finds it"),
    "one worker of a slice": (
        TPU | {"TPU_WORKER_HOSTNAMES": "a,b,c,d"},
        "TPU_WORKER_HOSTNAMES lists 4 hosts of a TPU slice, and TPU_WORKER_ID is not set",
    ),
    "a worker of a larger slice": (
        GKE | {"TPU_WORKER_ID": "2"},
        "^TPU_WORKER_ID=2 is not one of the 2 workers in TPU_WORKER_HOSTNAMES, so",
    ),
    "a part of the slices": (
        GKE | {"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"},
        "MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID are missing, as when another job",
    ),
    "a part of the slices on a TPU machine": (
        TPU | {"MEGASCALE_NUM_SLICES": "2"},
        "MEGASCALE_COORDINATOR_ADDRESS and MEGASCALE_SLICE_ID are missing",
    ),
    "a slice of a larger job": (
        GKE | SLICES | {"MEGASCALE_SLICE_ID": "2"},
        "MEGASCALE_SLICE_ID=2 is not one of MEGASCALE_NUM_SLICES=2 slices",
    ),
    "a part of skypilot": ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK"),
    "the second pod": (POD | {"JOB_COMPLETION_INDEX": "1"}, "^This pod is number 1 of an indexed"),
    "an address alone": (
        {"JAX_COORDINATOR_ADDRESS": "n1:1"},
        "JAX_COORDINATOR_ADDRESS='n1:1' names process 0, and no variable has the number",
    ),
}
NOTED = {
    "a shell of ssh in a job": ({"SLURM_JOB_ID": "7"}, "inside the Slurm job '7' and was not"),
    "--gpus-per-task": (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, "as with --gpus-per-task"),
    "slices without a TPU": (SLICES, "MEGASCALE_SLICE_ID: not used, because JAX finds no TPU"),
    "several hosts of a slice": (GKE, "has 2 hosts (TPU_WORKER_HOSTNAMES). A command on one"),
    "the first pod": (POD, "This pod is number 0 of an indexed Job"),
    "a proxy": (SLURM | {"https_proxy": "http://p:1"}, "https_proxy: the processes may try"),
    "a proxy that spares others": (
        SLURM | {"HTTP_PROXY": "http://p:1", "no_proxy": "localhost"},
        "Add n1 to no_proxy, or unset the proxy.",
    ),
}


@pytest.fixture
def of_jax(monkeypatch):
    """What JAX's own classes find in an environment: processes, own number, local, process 0."""
    # Without a metadata server. Its answer is what GKE's server gives.
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: ("", 404))

    def found(environ):
        for module in (cloud_tpu_cluster, cluster):
            monkeypatch.setattr(module, "running_in_cloud_tpu_vm", "TPU_ML_PLATFORM" in environ)
        with pytest.MonkeyPatch.context() as patch:
            for name in [*os.environ]:
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
            address, count, number, local = (
                clusters.ClusterEnv.auto_detect_unset_distributed_params(
                    None, None, None, None, None, 5
                )
            )
        return count, number, local and local[0], address

    return found


def values(detected):
    return (
        detected.cluster,
        detected.num_processes,
        detected.process_id,
        detected.tasks_on_node,
        detected.local_rank,
        detected.coordinator_address,
    )


@pytest.mark.parametrize("name", SAME_AS_JAX)
def test_an_environment_is_read_as_jax_reads_it(of_jax, name):
    environ, *expected = SAME_AS_JAX[name]
    detected = detect(environ)
    assert values(detected) == tuple(expected)
    assert not detected.problems
    count, number, local, address = of_jax(environ)
    assert (count, number, address) == (
        detected.num_processes,
        detected.process_id,
        detected.coordinator_address,
    )
    if "TPU_ML_PLATFORM" not in environ:  # JAX never chooses among the TPUs of a host.
        assert local == detected.local_rank


@pytest.mark.parametrize("name", OWN)
def test_an_environment_that_jax_does_not_read_alone_is_read(name):
    environ, *expected = OWN[name]
    detected = detect(environ, has_mpi4py=True, has_kubernetes=True)
    assert values(detected) == tuple(expected)
    assert not detected.problems


@pytest.mark.parametrize("name", IN_PART)
def test_an_environment_in_part_is_named_with_its_remedy(name):
    environ, sentence = IN_PART[name]
    problems = detect(environ, has_mpi4py=False, has_kubernetes=False).problems
    assert len(problems) == 1
    with pytest.raises(UserError, match=sentence):
        raise problems[0]


@pytest.mark.parametrize("name", NOTED)
def test_an_environment_that_works_and_may_surprise_is_noted(name):
    environ, sentence = NOTED[name]
    detected = detect(environ, has_kubernetes=False)
    assert not detected.problems
    assert sentence in " ".join(detected.notes)


@pytest.mark.parametrize(
    "environ",
    [
        SLURM,
        SLURM | {"https_proxy": "http://p:1", "no_proxy": "n1"},
        SLURM | {"https_proxy": "http://p:1", "no_proxy": "*"},
        SLURM | {"https_proxy": ""},
        {"https_proxy": "http://p:1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"},
    ],
)
def test_nothing_is_noted_where_nothing_surprises(environ):
    assert detect(environ).notes == ()


def test_each_value_has_the_variable_that_it_was_read_from():
    assert detect(SLURM).variables == {
        "num_processes": "SLURM_NTASKS",
        "process_id": "SLURM_PROCID",
        "tasks_on_node": "SLURM_STEP_TASKS_PER_NODE",
        "local_rank": "SLURM_LOCALID",
        "coordinator_address": "SLURM_STEP_NODELIST, SLURM_JOB_ID",
    }
    assert detect(GKE | SLICES).variables == {
        "num_processes": "TPU_WORKER_HOSTNAMES",
        "process_id": "TPU_WORKER_ID",
        "coordinator_address": "MEGASCALE_COORDINATOR_ADDRESS",
        "num_slices": "MEGASCALE_NUM_SLICES",
    }
    given = chosen_by_flags(detect(SLURM), "10.0.0.1:1", 4, 2)
    assert given.variables["process_id"] == "--process_id"
    assert given.variables["local_rank"] == "SLURM_LOCALID"


def test_every_cluster_that_jax_knows_is_known():
    """A class that a newer JAX adds must be read here too, or it would never be joined."""
    known = {each.name for each in clusters.ClusterEnv._cluster_types}
    assert known == {"ompi", "slurm", "mpi4py", "gketpu", "gcetpu", "tpu", ""}


@pytest.mark.parametrize(
    ("tasks_on_node", "local_rank", "num_visible", "num_on_node", "expected"),
    [
        (1, 0, 1, None, None),
        (1, 0, 8, 8, None),
        (2, 0, 2, 2, [0]),
        (2, 1, 2, 2, [1]),
        (8, 5, 8, None, [5]),
        (4, 3, 1, 4, [0]),  # Slurm shows each task its own.
        (4, 3, 1, None, [0]),
    ],
)
def test_a_process_takes_its_devices(tasks_on_node, local_rank, num_visible, num_on_node, expected):
    assert local_devices(tasks_on_node, local_rank, num_visible, num_on_node) == expected


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((2, 1, 4), "2 processes, of which this is number 1, and 4 visible GPUs"),
        ((4, 0, 2), "4 processes, of which this is number 0, and 2 visible GPUs"),
        ((2, 1, 1, 1), "2 processes, of which this is number 1, and 1 visible GPU."),
        ((2, 2, 2), "2 processes, of which this is number 2, and 2 visible GPUs"),
    ],
)
def test_devices_that_do_not_divide_are_refused_with_the_three_numbers(numbers, told):
    with pytest.raises(UserError, match="do not divide over its processes") as caught:
        local_devices(*numbers)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "num_visible", "expected"),
    [
        ({}, 0, None),  # no GPU: all CPU devices stay
        ({}, 2, [0]),  # two tasks, two GPUs
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}, 1, [0]),
        # A single task takes both, of which JAX would take the first.
        ({"SLURM_STEP_TASKS_PER_NODE": "1,1"}, 2, [0, 1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,1", "JAX_LOCAL_DEVICE_IDS": "1"}, 2, None),
    ],
)
def test_a_task_of_slurm_takes_its_gpus(variables, num_visible, expected):
    environ = SLURM | variables
    assert chosen_gpus(environ, detect(environ), num_visible) == expected
    arguments = initialize_arguments(environ, num_visible)
    assert arguments.get("local_device_ids") == expected


@pytest.mark.parametrize(
    "variables", [{}, {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}]
)
def test_more_tasks_than_gpus_are_refused(variables):
    with pytest.raises(UserError, match="2 processes, of which this is number 0, and 1 visible"):
        initialize_arguments(SLURM | variables, 1)


def test_a_described_cluster_is_joined_without_a_second_look():
    assert initialize_arguments(SLURM, 0) == {
        "coordinator_address": f"n1:{SLURM_PORT}",
        "num_processes": 4,
        "process_id": 2,
        "cluster_detection_method": "deactivate",
    }
    assert initialize_arguments({}, 8) is None
    assert initialize_arguments(GKE, 0) == {}


def test_flags_overrule_an_environment_in_part():
    environ, _ = IN_PART["a shell of salloc"]
    with pytest.raises(UserError):
        initialize_arguments(environ, 0)
    arguments = initialize_arguments(environ, 0, "10.0.0.1:1", 2, 1)
    assert (arguments["num_processes"], arguments["process_id"]) == (2, 1)


@pytest.mark.parametrize(
    ("given", "count"),
    [("0", 1), ("3,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-8932f9,MIG-1/2/0", 2)],
)
def test_gpus_are_counted_as_cuda_counts_them(given, count):
    assert num_gpus({"CUDA_VISIBLE_DEVICES": given}) == count


def test_gpus_do_not_count_where_jax_uses_the_cpu():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}) == 0


def run_alone(code, **variables):
    """Output of a program that runs without the devices of the tests."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_part_of_a_cluster_ends_at_once_and_says_what_to_do():
    environ, _ = IN_PART["an editor in a step"]
    began = time.monotonic()
    told = run_alone("from dist_ens import cluster; cluster.start()", **environ)
    assert "dist_ens.errors.UserError: Only a part of the variables of a Slurm step is set" in told
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_task_of_slurm_keeps_all_cpu_devices():
    code = (
        "from dist_ens import cluster; cluster.start(); import jax;"
        "print(jax.process_count(), jax.local_device_count())"
    )
    one = SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    one |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_LOCALID": "1"}
    assert run_alone(code, **one, JAX_NUM_CPU_DEVICES="3").split()[:2] == ["1", "3"]
