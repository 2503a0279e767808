"""Files that a run reads back: whatever is in them, it is told in a sentence or left out."""

import pytest

from dist_ens.callbacks import JsonLines, RunInfo
from dist_ens.ensemble import select_execution
from dist_ens.experiment import Experiment
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import from_json
from dist_ens.report import pace_before, read_run
from dist_ens.report.files import read_metrics
from dist_ens.storage import Disk

DEEP = b"[" * 100_000
HUGE = b"1" + b"0" * 400
GOOD = b'{"step": 8, "train/loss": 0.5, "test/nll": null}\n'
NO_RECORDS = [
    b'{"step": "x"}',
    b'{"step": true}',
    b'{"step": 5.0}',
    b'{"step": -1}',
    b'{"step": NaN}',
    b'{"step": 9223372036854775808}',  # one more than the largest int64
    b'{"step": ' + HUGE + b"}",
    b'{"step": 4, "step": 8}',
    b'{"step": 4, "train/loss": "low"}',
    b'{"step": 4, "train/loss": Infinity}',
    b'{"train/loss": 0.5}',
    b"[]",
    b"",
    b'{"step": 4, "\xff": 1}',
    DEEP,
    b'{"step": 4, "long": "' + b"x" * 10_000_000 + b'"}',
]
NO_OBJECTS = [b"null", b"[]", b"{", b"\xff", b'{"a": 1, "a": 2}', DEEP, HUGE, b""]


def writer_from(workdir, step):
    """The writer of a run that resumes from a step."""
    writer = JsonLines(workdir / "metrics.jsonl")
    writer.begin(RunInfo(None, [0], first_step=step, last_step=16, batch_size=8))
    return writer


@pytest.mark.quick
@pytest.mark.parametrize("line", NO_RECORDS, ids=lambda line: repr(line[:40]))
def test_a_line_that_is_no_record_is_dropped_and_told(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert read_metrics(Disk(tmp_path)) == [{"step": 8, "train/loss": 0.5, "test/nll": None}] * 2
    assert "1 of 3 lines in" in caplog.text
    writer_from(tmp_path, step=8).close()
    assert path.read_bytes() == GOOD + GOOD


@pytest.mark.quick
def test_lines_of_later_steps_and_a_last_one_without_its_end_are_dropped_in_silence(
    tmp_path, caplog
):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD + GOOD.replace(b"8", b"9") + GOOD[:20])
    writer_from(tmp_path, step=8).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == GOOD
    assert "metrics.jsonl" not in caplog.text


def test_a_part_that_leads_nowhere_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD)
    (tmp_path / "metrics.jsonl.parts").mkdir()
    (tmp_path / "metrics.jsonl.parts" / "1").symlink_to(tmp_path / "nowhere")
    assert len(read_metrics(Disk(tmp_path))) == 1


def test_a_log_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    told = "metrics.jsonl cannot be written: it is not a regular file. Move it away"
    with pytest.raises(UserError, match=told):
        writer_from(tmp_path, step=8)


@pytest.mark.quick
@pytest.mark.parametrize("content", NO_OBJECTS, ids=lambda content: repr(content[:40]))
def test_a_damaged_file_is_forgotten_or_named(tmp_path, content):
    for name in ("summary.json", "executions.json", "curves.json"):
        (tmp_path / name).write_bytes(content)
    assert pace_before(Disk(tmp_path), 8) == {}
    assert select_execution.kept_execution("program", Disk(tmp_path)) is None
    select_execution.keep_execution("program", "vmap", Disk(tmp_path))
    assert select_execution.kept_execution("program", Disk(tmp_path)) == "vmap"
    with pytest.raises(UserError, match=r"curves\.json"):
        read_run(tmp_path)


def test_a_run_resumes_with_damage_in_all_that_it_reads_back(tmp_path):
    def trained(steps):
        parts = {"data": {"global_batch_size": 32}, "model": {"name": "mlp", "hidden_sizes": (4,)}}
        train(Experiment.from_dict({"steps": steps, "num_members": 2, **parts}), tmp_path)

    trained(2)
    with (tmp_path / "metrics.jsonl").open("ab") as log:
        log.write(b"".join(line + b"\n" for line in NO_RECORDS))
    for name in ("summary.json", "executions.json", "curves.json"):
        (tmp_path / name).write_bytes(DEEP)
    trained(2)
    trained(4)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [from_json(line)["step"] for line in lines] == [2, 2, 4, 4]
