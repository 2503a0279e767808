"""How commands end: streams that cannot be written, and values that cannot be used."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import fast_xla
from commands import CLOSED, NOBODY, dist_ens
from conftest import COMMAND_ENVIRONMENT
from launch import ends

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = COMMAND_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
CONFIG = "--config=configs/digits.py"
DIST_ENS = f"{sys.executable} -c 'import launch; launch.main()'"
UNWRITTEN = "error: Some of the output could not be written: No space left on device. "
TINY = [CONFIG, "--config.num_members=2", "--config.execution=vmap"]
LONG = "x" * 20_000
K8S = ("k8s", "--name=a", "--image=b")
STARTS = ("--", "train", CONFIG)


def in_bash(line, **variables):
    return subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    ("stream", "code", "error"),
    [("| head -c 0", 0, ""), (">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 2, UNWRITTEN)],
)
def test_help_that_nobody_reads_is_no_error_and_one_that_is_lost_is(stream, code, error):
    ended = in_bash(f"set -o pipefail; {DIST_ENS} --help {stream}")
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(error)
    assert ended.stderr.count("\n") == bool(error)


@pytest.mark.quick
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_an_error_that_cannot_be_told_keeps_its_exit_code(stream):
    assert in_bash(f"{DIST_ENS} trian {stream}").returncode == 2


@pytest.mark.quick
def test_no_file_takes_the_place_of_a_stream_that_is_closed():
    # Libraries in C++ write to descriptors 1 and 2, whatever these are.
    code = "from launch import ends; ends.begin(); import os; os._exit(os.dup(0))"
    assert in_bash(f"{sys.executable} -c '{code}' <&- >&- 2>&-").returncode >= 3


@pytest.mark.parametrize(
    ("out", "code", "error"), [(CLOSED, 0, ""), (NOBODY, 0, ""), ("/dev/full", 2, UNWRITTEN)]
)
@pytest.mark.parametrize("flag", ["--help", "-h", "-help", "-?", "--helpshort"])
def test_the_help_of_a_verb_ends_as_that_of_all_does(flag, out, code, error):
    ended = dist_ens("train", flag, out=out)
    assert ended.returncode == code
    assert ended.stderr.startswith(error)
    assert ended.stderr.count("\n") == bool(error)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained while nobody read its output."""
    workdir = tmp_path_factory.mktemp("ends") / "run"
    ended = dist_ens("train", *TINY, f"--workdir={workdir}", "--config.steps=2", out=NOBODY)
    assert (ended.returncode, ended.stderr) == (0, "")
    return workdir


def test_a_run_goes_on_when_nobody_reads_its_output(run):
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    ("out", "err", "code", "error"),
    [
        (CLOSED, "err", 0, ""),
        (NOBODY, "err", 0, ""),
        (NOBODY, NOBODY, 0, ""),
        ("out", CLOSED, 0, ""),
        (CLOSED, CLOSED, 0, ""),
        ("/dev/full", "err", 1, UNWRITTEN),
        ("/dev/full", "/dev/full", 1, ""),
    ],
)
def test_results_are_written_whatever_becomes_of_the_output(run, tmp_path, out, err, code, error):
    scores = tmp_path / "scores.json"
    ended = dist_ens("evaluate", f"--workdir={run}", f"--json={scores}", out=out, err=err)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(error)
    assert ended.stderr.count("\n") == bool(error)
    assert "accuracy" in json.loads(scores.read_text())["test"]


@pytest.mark.parametrize("out", [CLOSED, NOBODY])
def test_other_verbs_end_in_silence_too(run, tmp_path, out):
    page = tmp_path / "page.html"
    ended = dist_ens("report", run, f"--output={page}", out=out)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert page.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--coordinator_address=x", "--num_processes=2", "--process_id=0"], "'x' is not"),
        (["train", "--stderrthreshold=foo"], "--stderrthreshold must be one of"),
        (["train", "--verbosity=abc"], "--verbosity cannot be 'abc': invalid literal"),
        (["train", "--v=x"], "--verbosity cannot be 'x': invalid literal"),
        (["train", "--flagfile=missing"], "Unable to open flagfile: "),
        (["train", f"--flagfile={sys.executable}"], "--flagfile cannot be read as text: "),
        (["train", "--xyz"], "Unknown command line flag 'xyz'. --help lists the flags."),
        (["train", "--noworkdir"], "Unknown command line flag 'noworkdir'. Did you mean: workdir?"),
        (["train", "--workdir"], "Missing value for flag --workdir. --help lists the flags."),
        (["train", "--workdir="], "--workdir is empty."),
        (["train", CONFIG, "--workdir=x", "y z"], "'y z' is not a flag: arguments are written"),
        (["bench", "--turns=1"], "--turns cannot be '1': 1 is not integer >= 2. --help says"),
        (["evaluate", "--pooling=nope"], "--pooling cannot be 'nope': value should be one of"),
        (["evaluate", "--shift=maybe"], "--shift cannot be 'maybe': Non-boolean argument"),
        ([LONG], "x' (20,000 characters) is not a verb of dist-ens"),
        (["train", "--num_processes", LONG], "(20,000 characters): invalid literal for int()"),
        (["train", f"--{LONG}"], "(20,000 characters) is not a flag. --help lists the flags."),
        (["train", LONG], "(20,000 characters) is not a flag"),
        (["train", f"--workdir={LONG}"], "--workdir cannot be used as a path: File name too long"),
        (["train", f"--config={LONG}"], "--config cannot be used as a path: File name too long"),
        (["train", CONFIG, "--workdir=x", f"--config.steps={LONG}"], "--config.steps cannot be"),
        (["train", CONFIG, "--workdir=x", f"--config.{LONG}=1"], "is not a flag"),
        (["train", CONFIG, "--workdir=x", f"--config.loss.name={LONG}"], "(20,000 characters)"),
        (["train", CONFIG, "--workdir=x", f"--config.data.source={LONG}"], "(20,000 characters)"),
        (["evaluate", f"--level={LONG}"], "(20,000 characters): could not convert string to float"),
        (["evaluate", f"--pooling={LONG}"], "(20,000 characters): value should be one of"),
        (["plan", CONFIG, f"--topology={LONG}"], "(20,000 characters)"),
        (
            ["report", "--workdir=runs/a"],
            "The folder of a run is missing. Type it without a flag: ",
        ),
        ([*K8S, "--memory=64GB", *STARTS], "--memory='64GB' is not an amount of memory in"),
        (["slurm", "--time=4hours", *STARTS], "--time='4hours' is not a time that sbatch reads."),
        (["report", LONG], "RUN cannot be used as a path: File name too long"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_value_that_cannot_be_used_is_one_short_message(words, sentence):
    ended = dist_ens(*words)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr) < 2000
    assert len(re.findall("x{90,}", ended.stderr)) in (0, 2)  # the two ends of a value, once
    assert not (ROOT / "x").exists()


def test_a_message_has_no_control_characters(tmp_path):
    ended = dist_ens("evaluate", f"--workdir={tmp_path}/\x1b[31mred")
    assert ended.returncode == 2
    assert r"\033[31mred" in ended.stderr
    assert "\x1b" not in ended.stderr


def test_a_message_of_many_words_is_cut_in_its_middle():
    # 2,000 characters of either end, and one for what lies between.
    assert len(ends.harmless("word " * 10_000)) == 4_001
    assert ends.harmless("two\nlines") == "two\nlines"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--nope=1", "XLA_FLAGS='--nope=1' cannot be used: Unknown flag in XLA_FLAGS: --nope=1."),
        (f"--nope={LONG}", "(20,000 characters)"),
        ("nope", "XLA_FLAGS='nope' cannot be used: Could not open file"),
        (
            "--xla_force_host_platform_device_count=abc",
            "cannot be used: Couldn't interpret value abc for flag xla_force_host_platform_device",
        ),
        ("--xla_force_host_platform_device_count=0", "JAX cannot start its devices with "),
    ],
    ids=lambda value: value[:40],
)
def test_flags_that_xla_would_abort_on_are_told(tmp_path, flags, sentence):
    flags = flags.replace(LONG, "x" * (20_000 - len("--nope=")))
    ended = dist_ens("train", CONFIG, f"--workdir={tmp_path / 'run'}", xla_flags=flags)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert len(ended.stderr) < 5000
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [DIST_ENS + " train", f"{sys.executable} -m launch.train"])
def test_a_variable_that_jax_refuses_is_told(command):
    ended = in_bash(f"{command} --workdir=x {CONFIG}", JAX_NUM_CPU_DEVICES="x")
    assert ended.returncode == 2
    assert 'JAX_PLATFORMS: Invalid value "x" for JAX flag jax_num_cpu_devices' in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_output_is_text_whatever_the_name_of_a_file(run, tmp_path):
    strange = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(run, strange)
    ended = dist_ens("report", strange, f"--output={strange}.html")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"\377.html'" in ended.stdout  # as a shell takes it
    assert r"<title>\udcff</title>" in pathlib.Path(f"{strange}.html").read_text()


def test_the_flags_of_these_tests_are_ones_that_xla_knows(tmp_path):
    ended = dist_ens("evaluate", f"--workdir={tmp_path}", xla_flags=fast_xla.flags(2))
    assert "There is no checkpoint in" in ended.stderr


@pytest.mark.parametrize(
    "verb", ["train", "evaluate", "predict", "report", "plan", "bench", "doctor"]
)
def test_every_flag_that_names_a_file_or_a_folder_reads_it_alike(verb):
    printed = dist_ens(verb, "--help").stdout
    described = re.findall(r"^  --(\w+): (.*)", printed, re.MULTILINE)
    named = [name for name, text in described if re.search("file|folder", text, re.IGNORECASE)]
    assert named
    assert ("config" in named) == (verb != "report")
    for flag in named:
        ended = dist_ens(verb, f"--{flag}={'a' * 256}")
        assert ended.returncode == 2
        expected = f"error: --{flag} cannot be used as a path: File name too long: "
        assert ended.stderr.startswith(expected), ended.stderr


def test_a_tilde_on_the_command_line_is_the_home_folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    words = f"train {' '.join(TINY)} '--workdir=~/runs/x' --config.steps=1"
    ended = in_bash(f"{DIST_ENS} {words}", HOME=str(home))
    assert ended.returncode == 0, ended.stderr
    assert (home / "runs" / "x" / "summary.json").exists()
    assert f"--workdir={home}/runs/x" in ended.stdout
    assert not (ROOT / "~").exists()


def test_an_output_whose_unfinished_name_is_too_long_is_refused_at_once(run):
    ended = dist_ens("evaluate", f"--workdir={run}", f"--json={'a' * 250}")
    assert ended.returncode == 2
    assert "--json cannot be used as a path: File name too long" in ended.stderr


def test_a_full_disk_is_a_message_with_its_own_exit_code_wherever_it_happens():
    code = (
        "import errno\n"
        "from launch import cli, signals\n"
        "signals.begin()\n"
        "def main():\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device', 'runs/a/summary.json')\n"
        "cli.run(main, joins_cluster=lambda: False)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ended.returncode == 46
    assert ended.stderr == (
        "error: A file runs/a/summary.json could not be written: no space left on device. Free "
        "some space there, then run the same command again.\n"
    )
