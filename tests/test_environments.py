"""Commands in odd environments, as a shell starts them: each works, with exit code 0."""

import os
import shlex
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fast_xla
from commands import process
from conftest import ROOT
from dist_ens.checkpoint import saved_steps
from test_kills import records, saved_bits

DIST_ENS = shlex.join([sys.executable, "-c", "import launch; launch.main()"])
TINY = [
    *(f"--config={ROOT / 'configs' / 'digits.py'}", "--config.num_members=2"),
    *("--config.execution=loop", "--config.model.hidden_sizes=(8,)", "--config.steps_per_call=1"),
]
STRANGE = "runs \u00e4\u6570/my run's"
# The encoding is ASCII, which Python replaces by UTF-8 unless it is told not to.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Without a home folder there is no cache either.
NO_HOME = dict.fromkeys(["HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "JAX_COMPILATION_CACHE_DIR"])
NEEDED = ("PATH", "PYTHONPATH", "JAX_PLATFORMS", "XLA_FLAGS")
ODD = {
    "ASCII": {"environ": ASCII},
    "no HOME": {"environ": NO_HOME},
    "HOME that is no folder": {"environ": NO_HOME | {"HOME": "/dev/null"}},
    "COLUMNS=20": {"environ": {"COLUMNS": "20"}},
    "COLUMNS=x": {"environ": {"COLUMNS": "x"}},
    "few variables": {"environ": {name: None for name in os.environ if name not in NEEDED}},
}
# A user that the system does not know, as many containers have, where the kernel permits it.
UNKNOWN = ["unshare", "--user", "--map-user=54321"]
if shutil.which("unshare") and subprocess.run([*UNKNOWN, "true"], check=False).returncode == 0:
    ODD["a user without a name"] = {"environ": NO_HOME, "before": UNKNOWN}
VERBS = [
    "evaluate --workdir={run}",
    "report {run} --output={run}/page.html",
    "doctor {tiny} --workdir={run}",
    "predict --workdir={run} --input=x.npy --output={run}/p.npz",
    "members {run} verify",
    "replay {run} --member=1",
    "plan {tiny} --topology=cpu:2",
    "slurm render --output={run}/job.sh -- train {tiny} --workdir={run}",
    "local --processes=2 -- train {tiny} --config.steps=2 --workdir={run}/local",
]
# Sets the clock back by an hour as soon as a file exists, for everything but the file system.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static time_t back(void) { return access(getenv("SET_BACK"), F_OK) ? 0 : 3600; }

int clock_gettime(clockid_t id, struct timespec *t) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, t);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec -= back();
  return failed;
}
"""
SETTING_BACK = """
import os, pathlib, runpy, time
get_config = runpy.run_path({digits!r})["get_config"]

class SetBack:
    def __call__(self, info):
        time.sleep(0.02)  # So that saves by the clock are due.
        if info.step == 40 and "SET_BACK" in os.environ:
            before = time.time()
            pathlib.Path(os.environ["SET_BACK"]).touch()
            assert time.time() < before - 3000

def make_callbacks(spec):
    return [SetBack()]
"""


def in_shell(line, cwd, environ=(), before=(), **options):
    """What a line of bash has printed, in which every command has succeeded."""
    words = [*before, "bash", "-c", f"set -o pipefail; {line}"]
    variables = {"XLA_FLAGS": fast_xla.flags(1), **dict(environ)}
    ended = process(*words, cwd=cwd, **variables, **options)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    assert "Traceback" not in told, told
    return told


def trained(cwd, workdir, after="", steps=3, **options):
    """Trains a short run."""
    words = shlex.join(["train", *TINY, f"--workdir={workdir}", f"--config.steps={steps}"])
    told = in_shell(f"{DIST_ENS} {words}{after}", cwd, **options)
    assert (cwd / workdir / "report.html").exists(), told
    assert saved_steps(cwd / workdir)[-1] == steps


def test_a_run_works_where_everything_is_odd_at_once(tmp_path):
    environ = ASCII | {"COLUMNS": "20", "HOME": None}
    trained(tmp_path, STRANGE, " | head -1", environ=environ, umask=0o077)
    found = {stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / STRANGE).rglob("*")}
    assert found == {0o700, 0o600}


@pytest.mark.faults
@pytest.mark.parametrize("odd", ODD)
def test_every_command_works_in_an_odd_environment(odd, tmp_path):
    np.save(tmp_path / "x.npy", load_digits().images[:5])
    trained(tmp_path, STRANGE, **ODD[odd])
    for verb in VERBS:
        words = verb.format(run=shlex.quote(STRANGE), tiny=shlex.join(TINY))
        in_shell(f"{DIST_ENS} {words}", tmp_path, **ODD[odd])
    assert not (tmp_path / "~").exists()


@pytest.mark.faults
def test_a_clock_that_is_set_back_during_a_run_changes_nothing(tmp_path):
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    compiler = ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"]
    subprocess.run(compiler, check=True)
    config = tmp_path / "config.py"
    config.write_text(SETTING_BACK.format(digits=str(ROOT / "configs" / "digits.py")))
    words = [*TINY[1:], f"--config={config}", "--config.checkpoint.every_secs=0.2"]
    words += ["--config.checkpoint.keep=1000", "--config.logging.every_steps=10"]

    def run(workdir, steps, **environ):
        line = ["train", *words, f"--workdir={tmp_path / workdir}", f"--config.steps={steps}"]
        return in_shell(f"{DIST_ENS} {shlex.join(line)}", tmp_path, environ=environ)

    run("whole", 120)
    changed = {"LD_PRELOAD": str(library), "SET_BACK": str(tmp_path / "set_back")}
    run("run", 80, **changed)
    steps = saved_steps(tmp_path / "run")
    # 40 steps of 20 ms or more on either side of the change, and a save every 200 ms.
    assert sum(step < 40 for step in steps) >= 2
    assert sum(step > 40 for step in steps) >= 2
    told = run("run", 120, **changed)
    assert "resuming from step 80" in " ".join(told.split())
    assert saved_bits(tmp_path / "run") == saved_bits(tmp_path / "whole")
    # The run that ended at step 80 was scored there.
    trained_on = [record for record in records(tmp_path / "run") if "test/nll" not in record]
    assert trained_on == [r for r in records(tmp_path / "whole") if "test/nll" not in r]
