"""`dist-ens doctor`, in processes as a user starts them."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens import __version__
from dist_ens.cluster_environment import chosen_by_flags, detect
from launch import diagnosis
from launch.diagnosis import Finding

DIGITS = "--config=configs/digits.py"
LIMIT_SECS = 200
SLURM_SHELL = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}


def started(*arguments, patience=60, **variables):
    """A doctor that waits `patience` seconds for other processes."""
    code = (
        "import sys; from launch import doctor;"
        f"doctor._PATIENCE_SECS['processes'] = {patience}; sys.argv[0] = 'dist-ens'; doctor.run()"
    )
    environment = COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes):
    """What each process printed, and its exit code."""
    try:
        printed = [process.communicate(timeout=LIMIT_SECS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(text, process.returncode) for text, process in zip(printed, processes, strict=True)]


def doctor(*arguments, **options):
    """What a doctor printed, and its exit code."""
    return ended(started(*arguments, **options))[0]


def rows(printed):
    """The mark and the text of each row of the table, by the name of the check."""
    found = re.findall(r"^ (ok|note|bad) +(\S+(?: \S+)?) {2,}(.*?) *$", printed, re.MULTILINE)
    return {check: (mark, text) for mark, check, text in found}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def two(*arguments, variables=({}, {}), **options):
    """What each of two doctors of one run printed, and its exit code."""
    cluster = [f"--coordinator_address=127.0.0.1:{free_port()}", "--num_processes=2"]
    return ended(
        *(
            started(*cluster, f"--process_id={number}", *arguments, **own, **options)
            for number, own in enumerate(variables)
        )
    )


def test_a_process_alone_is_sound_and_nothing_is_left(tmp_path):
    workdir = tmp_path / "runs" / "x"
    printed, code = doctor(DIGITS, f"--workdir={workdir}", JAX_NUM_CPU_DEVICES="4")
    assert code == 0, printed
    found = rows(printed)
    assert found["cluster"] == ("ok", "none: this process is alone")
    assert found["devices"] == ("ok", "4 devices (cpu)")
    # 8 members on 4 devices: 4 rows, and one column, which this host feeds.
    mesh = "4 x 1 (ensemble x data) for 8 members; here members 0 to 7 and data columns 0"
    assert found["mesh"] == ("ok", mesh)
    assert f"dist-ens {__version__}, jax " in found["versions"][1]
    assert f"{workdir}, not there; {tmp_path} is writable" in found["workdir"][1]
    assert printed.splitlines()[-1].startswith("A run can start. Next: dist-ens train")
    assert not [*tmp_path.iterdir()]


def test_two_hosts_are_compared_and_the_first_reports(tmp_path):
    (printed, code), (of_second, code_of_second) = two(DIGITS, f"--workdir={tmp_path}")
    assert (code, code_of_second, of_second) == (0, 0, ""), printed + of_second
    found = rows(printed)
    assert found["cluster"] == ("ok", "flags: process 0 of 2")
    assert found["devices"][1] == "2 devices (cpu) over 2 processes; here 1"
    host = socket.gethostname()
    assert found["hosts"] == ("ok", f"2 processes on {host}, with equal versions")
    assert found["shared workdir"][0] == "ok"
    assert "here members 0 to 3 and data columns 0" in found["mesh"][1]
    coordinator = (
        r"127.0.0.1:\d+ \(--coordinator_address\); process 0 listens on this machine alone"
    )
    assert re.fullmatch(coordinator, found["coordinator"][1])
    assert found["num processes"] == ("ok", "2 (--num_processes)")
    assert not [*tmp_path.iterdir()]


def test_another_version_on_one_host_is_named_by_all(tmp_path):
    other = tmp_path / "numpy-9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    (printed, code), (of_second, code_of_second) = two(variables=({}, path))
    assert (code, code_of_second) == (2, 2)
    told = r"different versions of numpy: \S+ in process 0 \(host .*\) and 9\.9 in process 1 \(host"
    for output in (printed, of_second):
        assert re.search(told, " ".join(output.split())), output


def test_a_host_that_never_comes_does_not_keep_doctor_waiting(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    cluster = [f"--coordinator_address={address}", "--num_processes=2", "--process_id=0"]
    began = time.monotonic()
    printed, code = doctor(*cluster, f"--workdir={tmp_path}", patience=5)
    assert code == 2
    assert time.monotonic() - began < 150  # of which most are imports
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if address in command]
    assert rows(printed)["processes"] == ("bad", "no end within 5 s")
    assert f"on every host at the same time, and check that each host reaches {address}" in printed
    assert rows(printed)["workdir"][0] == "ok"


def test_devices_that_do_not_start_are_reported_and_doctor_goes_on(tmp_path):
    printed, code = doctor(f"--workdir={tmp_path}", JAX_PLATFORMS="cuda")
    assert code == 2
    assert rows(printed)["devices"] == ("bad", "failed")
    assert "devices: JAX cannot start its devices with JAX_PLATFORMS='cuda'" in printed
    assert rows(printed)["workdir"][0] == "ok"


def test_an_environment_in_part_is_told_without_starting_anything():
    printed, code = doctor(**SLURM_SHELL)
    assert code == 2
    assert rows(printed)["devices"] == ("ok", "not started, because of the cluster")
    assert "cluster: Only a part of the variables of a Slurm step is set in job '7'" in printed


def test_a_config_that_does_not_divide_is_told():
    axis = ["--config.layout.ensemble_axis=1", "--config.data.global_batch_size=7"]
    printed, code = doctor(DIGITS, *axis, JAX_NUM_CPU_DEVICES="2")
    assert code == 2
    assert rows(printed)["mesh"] == ("bad", "impossible")
    assert "got data.global_batch_size=7 and a data axis of 2 (2 devices of 1 host" in printed


def test_fix_makes_the_workdir_and_closes_the_cache(tmp_path):
    cache, workdir = tmp_path / "cache" / "dist_ens" / "compiled", tmp_path / "runs"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    environment = {k: v for k, v in COMMAND_ENVIRONMENT.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "launch.doctor", f"--workdir={workdir}", "--fix"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS
    )
    assert ended.returncode == 0, ended.stderr
    assert cache.stat().st_mode & 0o777 == 0o700
    assert workdir.is_dir()
    assert "Others may write" not in ended.stdout


@pytest.mark.quick
def test_a_cache_that_others_may_write_to_is_noted_and_left_as_it_is(tmp_path):
    (tmp_path / "program").write_bytes(bytes(3 * 2**20))
    tmp_path.chmod(0o777)
    finding = diagnosis.of_cache(tmp_path, is_own=True, fix=False)
    assert f", 3 MiB, owner {getpass.getuser()}, mode 777" in finding.found
    assert f"others may write to {tmp_path}, so the cache is not used." in finding.remedy
    # A folder that the user named may be shared on purpose.
    named = diagnosis.of_cache(tmp_path, is_own=False, fix=True).remedy
    assert "Use this folder only if you trust everybody who can write to it." in named
    assert tmp_path.stat().st_mode & 0o777 == 0o777
    assert diagnosis.of_cache(None, is_own=False, fix=False).found.startswith("disabled")


@pytest.mark.quick
def test_a_workdir_that_is_a_file_or_lies_below_one_is_bad(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        finding = diagnosis.of_workdir(path, fix=True)
        assert finding.is_bad
        assert "Choose another --workdir" in finding.remedy


@pytest.mark.quick
def test_a_full_disk_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "_LITTLE_BYTES", shutil.disk_usage(tmp_path).total + 1)
    finding = diagnosis.of_workdir(tmp_path, fix=False)
    assert re.search(r"^Only [\d,]+ MiB are free in ", finding.remedy)
    assert not finding.is_bad


@pytest.mark.quick
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux lists the locks of files, and has TPUs"
)
def test_a_lock_of_the_tpus_is_told_with_the_process_that_holds_it(tmp_path):
    lock = tmp_path / "lock"
    assert diagnosis.of_tpu_lock(lock, fix=True) is None
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            finding = diagnosis.of_tpu_lock(lock, fix=True)
        finally:
            holder.kill()
    assert finding.is_bad
    assert f"end it: kill {holder.pid}." in finding.remedy
    assert lock.exists()
    assert diagnosis.of_tpu_lock(lock, fix=False) == Finding(
        "TPU lock", f"{lock}, held by no process"
    )
    assert "removed" in diagnosis.of_tpu_lock(lock, fix=True).found
    assert not lock.exists()


@pytest.mark.quick
def test_memory_of_gpus_is_read_from_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def says(text):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return diagnosis.of_gpu_memory()

    assert says("exit 0") == Finding("GPU memory", "held by no process")
    assert "process 41 holds 512 MiB. JAX" in says("echo '41, 512 MiB'").remedy
    assert "process [N/A] holds 9 MiB" in says("echo '[N/A], 9 MiB'").remedy
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen([*words, diagnosis.PROBE], stdout=subprocess.PIPE) as probe:
        probe.stdout.readline()
        told = says(f"echo '{probe.pid}, 9 MiB'")  # The probe of a doctor is not left over.
        probe.kill()
    assert told == Finding("GPU memory", "held by no process")
    assert "nvidia-smi failed: 'no driver'." in says("echo no driver; exit 9").remedy
    monkeypatch.setattr(diagnosis, "_SMI_SECS", 0.2)
    assert "gave no answer within" in says("sleep 5").remedy


@pytest.mark.quick
def test_the_address_on_which_process_0_listens_is_told():
    flags = chosen_by_flags(detect({}), "10.0.0.1:4711", 2, 0)

    def found(**environ):
        told = diagnosis.of_cluster(flags, environ, 0)
        return next(each for each in told if each.check == "coordinator")

    assert found().found.endswith("; process 0 listens on all networks of its machine")
    bound = found(JAX_COORDINATOR_BIND_ADDRESS="10.1.0.1:4711")
    assert bound.found.endswith("; process 0 listens on 10.1.0.1:4711")
    assert not bound.is_bad
    wrong = found(JAX_COORDINATOR_BIND_ADDRESS="10.1.0.1")
    assert wrong.is_bad
    assert "JAX_COORDINATOR_BIND_ADDRESS='10.1.0.1' is not host:port" in wrong.remedy


@pytest.mark.quick
def test_hosts_that_do_not_see_the_files_of_process_0_are_named():
    assert not diagnosis.of_shared_workdir([True, True]).is_bad
    finding = diagnosis.of_shared_workdir([True, False, True, False])
    assert finding.is_bad
    assert finding.found.startswith("2 of 4 processes")
    assert finding.remedy.startswith("The processes 1, 3 do not see the files of process 0.")


@pytest.mark.quick
def test_gpus_that_do_not_divide_are_told():
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2"}
    environ |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "1"}
    *_, local = diagnosis.of_cluster(detect(environ), environ, 2)
    assert local == Finding("local devices", "GPUs 1 of 2 visible")
    *_, local = diagnosis.of_cluster(detect(environ), environ, 4)
    assert local.is_bad
    assert "2 processes, of which this is number 1, and 4 visible GPUs" in local.remedy


@pytest.mark.quick
def test_bad_findings_come_first():
    findings = [Finding("a", "", "Note."), Finding("b", ""), Finding("c", "", "Bad.", is_bad=True)]
    assert diagnosis.remedies_of(findings) == ["c: Bad.", "a: Note."]
