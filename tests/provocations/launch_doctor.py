"""How messages on the environment of a cluster, and those of `dist-ens doctor`, are provoked."""

from dist_ens.cluster_environment import detect, local_devices

_SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n1,n2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
_TPU = {"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "n1,n2"}


def _started_with(**variables):
    """Raises the problem of an environment, as the start of a run does."""
    for problem in detect(variables, has_mpi4py=False, has_kubernetes=False).problems:
        raise problem


def a_batch_script_without_srun():
    _started_with(SLURM_JOB_ID="7", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NNODES="2")


def a_shell_of_an_editor_in_a_slurm_step():
    _started_with(SLURM_JOB_ID="7", SLURM_STEP_ID="0")


def a_shell_of_salloc():
    _started_with(**_SLURM, SLURM_STEP_NUM_TASKS="1")


def a_number_of_a_task_that_is_none():
    _started_with(**_SLURM | {"SLURM_PROCID": "-1"})


def a_task_of_another_job():
    _started_with(**_SLURM | {"SLURM_PROCID": "9"})


def a_part_of_openmpi():
    _started_with(OMPI_COMM_WORLD_SIZE="2")


def openmpi_on_two_machines_without_mpi4py():
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    _started_with(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_SIZE="1", **rank)


def one_worker_of_a_slice():
    _started_with(**_TPU)


def a_worker_of_another_slice():
    _started_with(**_TPU, TPU_WORKER_ID="2")


def a_part_of_several_slices():
    _started_with(**_TPU, TPU_WORKER_ID="0", MEGASCALE_COORDINATOR_ADDRESS="n0")


def a_slice_of_another_job():
    slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "2"}
    _started_with(**_TPU, TPU_WORKER_ID="0", MEGASCALE_COORDINATOR_ADDRESS="n0", **slices)


def a_part_of_skypilot():
    _started_with(SKYPILOT_NUM_NODES="2")


def the_second_pod_of_a_job():
    _started_with(KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX="1")


def an_address_without_a_number_of_processes():
    _started_with(JAX_COORDINATOR_ADDRESS="n1:1234")


def more_processes_than_gpus():
    local_devices(4, 1, 2)
