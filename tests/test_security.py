"""What a run reads cannot run code, and what the environment holds is written nowhere."""

import ast
import os

import pytest

from commands import start
from conftest import ROOT

SOURCES = [path for folder in ("dist_ens", "launch") for path in (ROOT / folder).rglob("*.py")]
# The file that runs a config file, and those that import parts of dist_ens when they are used.
MAY_RUN_CODE = {
    "dist_ens/experiment/config_file.py": ["runpy"],
    "dist_ens/__init__.py": ["import_module", "import_module"],
    "dist_ens/experiment/named.py": ["import_module"],
    "dist_ens/sklearn/estimator.py": ["cloudpickle"],  # within pickles that users write and read
    "launch/__init__.py": ["import_module"],
    "dist_ens/ground/extras.py": ["import_module"],  # of names that the code gives
}
RUN_CODE = {
    *("runpy", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code"),
}
ATTRIBUTES = {
    *("unsafe_load", "UnsafeLoader", "import_module", "exec_module", "serialize_executable"),
    *("deserialize_and_load", "system"),
}
SECRET = "hunter2-that-is-planted"


def ways_to_run_code(text):
    """Names in a source file by which what is read could be run."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in RUN_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUN_CODE:
            yield node.module
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("eval", "exec", "compile", "__import__"):
                yield node.func.id
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield "allow_pickle"
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield "shell"
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr


def test_no_file_is_read_by_what_could_run_code():
    found = {str(path.relative_to(ROOT)): [*ways_to_run_code(path.read_text())] for path in SOURCES}
    assert {path: ways for path, ways in found.items() if ways} == MAY_RUN_CODE


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from joblib import load", "import dill.source", "eval(text)"),
        *("np.load(path, allow_pickle=True)", "yaml.load(text, yaml.UnsafeLoader)"),
        *("import runpy", "importlib.import_module(name)", "__import__(name)"),
        *("compile(text, name, 'exec')", "os.system(text)", "subprocess.run(text, shell=True)"),
        "serialize_executable.deserialize_and_load(text)",
    ],
)
def test_what_could_run_code_is_found(text):
    assert len(list(ways_to_run_code(text))) == 1


def test_a_secret_of_the_environment_is_in_no_file_and_no_output(tmp_path):
    config = tmp_path / "config.py"
    config.write_text((ROOT / "configs" / "digits.py").read_text())
    train = ["train", f"--config={config}", f"--workdir={tmp_path / 'run'}", "--config.steps=2"]
    train += ["--config.execution=vmap", "--config.num_members=2"]
    commands = [
        train,
        ["doctor", f"--config={config}", f"--workdir={tmp_path / 'run'}"],
        ["slurm", "render", f"--output={tmp_path / 'job.sh'}", "--", *train],
        ["evaluate", f"--workdir={tmp_path / 'run'}"],
        ["train", f"--config={tmp_path / 'none.py'}", f"--workdir={tmp_path / 'none'}"],
    ]
    environ = {"WANDB_API_KEY": SECRET, "HTTPS_PROXY": f"http://someone:{SECRET}@127.0.0.1:9"}
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    for number, command in enumerate(commands):
        start(command, folder=tmp_path, name=f"output_{number}", environ=environ).codes()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {os.path.relpath(path, tmp_path) for path in files}
    assert {"run/summary.json", "run/report.html", "job.sh"} <= names, names
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
