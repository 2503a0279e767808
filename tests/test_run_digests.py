"""Digests of what a run writes beside its checkpoints: a change is told where it is read."""

import os

import numpy as np
import pytest

from dist_ens.callbacks import JsonLines, RunInfo
from dist_ens.checkpoint.run_digests import changed_files, write_run_file
from dist_ens.ground.errors import ExitCode
from dist_ens.report import read_run, write_report, write_summary
from dist_ens.storage import Disk
from saving import flip, verified
from test_bit_rot import save

FILES = ("summary.json", "metrics.jsonl.parts/0", "curves.json", "pictures.npy", "report.html")


@pytest.fixture
def run(tmp_path):
    """A run of one checkpoint with a report, whose metrics still grow in a part."""
    save(tmp_path, steps=(100,))
    writer = JsonLines(tmp_path / "metrics.jsonl")
    writer.begin(RunInfo(None, [0], 0, 200, 8))
    writer.write(100, {"train/loss": 0.5})
    writer.sync()
    writer.write(110, {"train/loss": 0.25})
    scores = {"test": {"nll": 0.5}, "mean_member": {"nll": 0.75}}
    write_summary(Disk(tmp_path), scores)
    write_report(Disk(tmp_path), scores, {"a later section": 0.5}, [np.full((2, 2), 0.5)])
    return tmp_path


def test_a_run_as_it_was_written_is_sound_while_its_metrics_grow(run):
    assert verified(run) == (ExitCode.DONE, ["Step 100: sound."])
    assert read_run(run).faults == []


@pytest.mark.parametrize("name", FILES)
def test_a_changed_digit_is_told_by_verify_and_in_the_report(run, name, caplog):
    # 0.5 becomes 0.4: in a file of JSON, it is another valid number.
    path = run / name
    place = path.read_bytes().find(b"0.5") + 2 if name != "pictures.npy" else -1
    flip(path, place)
    fault = f"the file {name} has changed since it was written"
    code, told = verified(run)
    assert (code, told[-1]) == (ExitCode.DAMAGED, f"Beside the checkpoints: {fault}.")
    if name != "report.html":
        [sentence] = read_run(run).faults
        assert sentence == f"Of {run} {fault}, so what is shown of it may be wrong."
        assert sentence in caplog.text
        if name in ("summary.json", "metrics.jsonl.parts/0"):
            write_report(Disk(run), {}, {}, [])  # Another evaluation draws the page anew.
            assert sentence in (run / "report.html").read_text()


def test_a_missing_file_is_told_and_one_without_a_digest_is_not(run):
    (run / "notes.txt").write_text("mine")
    (run / "summary.json").unlink()
    _, told = verified(run)
    assert told[1:] == ["Beside the checkpoints: the file summary.json is missing."]


def test_metrics_that_have_changed_are_told_when_their_run_resumes(run, caplog):
    part = run / "metrics.jsonl.parts" / "0"
    flip(part, part.read_bytes().find(b"0.5") + 2)
    JsonLines(run / "metrics.jsonl").begin(RunInfo(None, [0], 100, 200, 8))
    assert "the file metrics.jsonl.parts/0 has changed since it was written" in caplog.text


def test_a_file_whose_new_content_could_not_be_written_keeps_its_digest(tmp_path):
    path = tmp_path / "summary.json"
    write_run_file(Disk(tmp_path), path.name, "old")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    for content in ("new", "newer"):
        with pytest.raises(OSError, match="it is a symbolic link"):
            write_run_file(Disk(tmp_path), path.name, content)
    assert changed_files(Disk(tmp_path)) == []
    path.unlink()
    os.rename(tmp_path / "moved", path)
    path.write_text("other")
    assert changed_files(Disk(tmp_path)) == [
        "the file summary.json has changed since it was written"
    ]
