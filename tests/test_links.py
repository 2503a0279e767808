"""Nothing is written through a symbolic link in a run, and no path leads out of its folder."""

import json
import os

import numpy as np
import pytest

from dist_ens.callbacks import JsonLines, RunInfo
from dist_ens.checkpoint import Checkpoints, saved_steps
from dist_ens.checkpoint.run_digests import changed_files
from dist_ens.ensemble.select_execution import keep_execution
from dist_ens.experiment import Experiment, open_source
from dist_ens.experiment.assessment import EvaluationRequest, assess
from dist_ens.experiment.train import train
from dist_ens.ground.errors import SaveError, UserError
from dist_ens.ground.file_writing import opened_in_place, replace_file, replaced_file
from dist_ens.layout import Layout
from dist_ens.report import write_report
from dist_ens.storage import Disk
from saving import snapshot
from two_savers import RECORD

pytestmark = pytest.mark.quick
RUN = RunInfo(None, member_ids=[0], first_step=0, last_step=9, batch_size=8)
SCORES = ["summary.json", "curves.json", "pictures.npy", "report.html"]
NAMES = [*SCORES, "metrics.jsonl", "experiment.json", "executions.json"]


@pytest.fixture
def outside(tmp_path):
    """A file that no run may touch."""
    path = tmp_path / "outside"
    path.write_text("precious")
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def assert_untouched(outside, link):
    assert (outside.read_text(), link.is_symlink()) == ("precious", True)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_refused_a_folder_with_a_link_in_place_of_one_of_its_files(name, folder, outside):
    (folder / name).symlink_to(outside)
    told = f"{name} cannot be written: it is a symbolic link, through which nothing is written"
    with pytest.raises(UserError, match=told):
        train(Experiment.from_dict({"num_members": 2, "steps": 1}), folder)
    assert_untouched(outside, folder / name)
    assert [path.name for path in folder.iterdir()] == [name]


def test_the_names_above_are_those_that_a_run_writes(tmp_path):
    parts = {"data": {"global_batch_size": 8}, "model": {"name": "mlp", "hidden_sizes": (4,)}}
    trained = train(Experiment.from_dict({"num_members": 2, "steps": 2, **parts}), tmp_path)
    keep_execution("a program", "vmap", Disk(tmp_path))
    source = open_source(trained.run.experiment.data)
    evaluator = trained.run.evaluator(trained.ensemble)
    found = assess(trained.run, evaluator, trained.state, source, EvaluationRequest())
    write_report(Disk(tmp_path), found.to_dict(), found.curves, found.pictures)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {*NAMES, ".lock", "checkpoints", ".digests"}
    with_digest = {path.name for path in (tmp_path / ".digests").iterdir()}
    assert with_digest == {*NAMES}
    assert changed_files(Disk(tmp_path)) == []


@pytest.mark.parametrize("target", ["outside", "absent"])
def test_a_link_in_place_of_the_lock_is_refused_and_its_target_stays(folder, outside, target):
    link = folder / ".lock"
    link.symlink_to(outside.with_name(target))
    told = r"\.lock cannot be written: it is a symbolic link"
    with pytest.raises(UserError, match=told), Checkpoints(folder).open(RECORD):
        pass
    assert_untouched(outside, link)
    assert not outside.with_name("absent").exists()


def test_a_link_that_replaces_the_lock_of_a_run_is_not_written_to(folder, outside):
    with Checkpoints(folder).open(RECORD):
        token = (folder / ".lock").read_text()
        (folder / ".lock").unlink()
        outside.write_text(token)  # The run takes the file for its own, and would empty it.
        (folder / ".lock").symlink_to(outside)
    assert outside.read_text() == token


def test_a_folder_of_a_run_may_be_a_link_itself(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder)
    state = {"w": np.zeros((2, 3), np.float32)}
    with Checkpoints(tmp_path / "latest").open(RECORD) as opened:
        opened.save(snapshot(1, Layout.make(2, ensemble_axis=1).put(state, "members")))
    assert saved_steps(folder) == [1]


def test_metrics_are_not_written_through_a_link_that_comes_before_or_during_a_run(folder, outside):
    path = folder / "metrics.jsonl"
    path.symlink_to(outside)
    writer = JsonLines(path)
    with pytest.raises(
        UserError, match="it is a symbolic link, .* Move it away, or choose another"
    ):
        writer.begin(RUN)
    assert_untouched(outside, path)
    path.unlink()
    writer.begin(RUN)
    path.symlink_to(outside)
    writer.write(1, {"train/loss": 0.5})
    with pytest.raises(SaveError, match="it is a symbolic link"):
        writer.close()
    assert_untouched(outside, path)


def test_a_choice_is_not_kept_through_a_link_and_the_run_continues(folder, outside, caplog):
    (folder / "executions.json").symlink_to(outside)
    keep_execution("a program", "vmap", Disk(folder))
    assert "it is a symbolic link" in caplog.text
    assert_untouched(outside, folder / "executions.json")
    # The name of the unfinished file can be guessed.
    (folder / "executions.json").unlink()
    (folder / "executions.json.unfinished").symlink_to(outside)
    keep_execution("a program", "vmap", Disk(folder))
    assert outside.read_text() == "precious"
    assert json.loads((folder / "executions.json").read_text()) == {"a program": "vmap"}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: opened_in_place(path, "a"),
        lambda path: opened_in_place(path, "w"),
        lambda path: replace_file(path, "{}"),
    ],
)
def test_nothing_is_written_to_a_link_or_a_pipe(folder, outside, write):
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(outside)
    with pytest.raises(OSError, match="it is a symbolic link, through which nothing is written"):
        write(folder / "link")
    with pytest.raises(OSError, match="it is not a regular file"):
        write(folder / "pipe")
    assert_untouched(outside, folder / "link")
    assert (folder / "pipe").is_fifo()
    assert len([*folder.iterdir()]) == 2


def test_a_link_under_the_unfinished_name_is_not_followed_and_an_error_leaves_the_old_content(
    folder, outside
):
    path = folder / "summary.json"
    (folder / "summary.json.unfinished").symlink_to(outside)
    replace_file(path, "old")
    with pytest.raises(TypeError), replaced_file(path) as file:
        file.writelines([b"half", None])
    assert (outside.read_text(), path.read_text()) == ("precious", "old")
    assert list(folder.iterdir()) == [path]
