"""Files that a run reads back: whatever is in them, it is told in a sentence or left out."""

import copy
import json

import numpy as np
import pytest

from dist_ens.callbacks import JsonLines, RunInfo
from dist_ens.config import Experiment
from dist_ens.errors import RunError, UserError
from dist_ens.execution import decision_cache
from dist_ens.experiment.train import train
from dist_ens.json_text import from_json
from dist_ens.report import pace_before, read_run
from dist_ens.report.metrics_file import read_metrics
from dist_ens.report.page import write_page
from test_report_page import classification, minimal, regression

DEEP = b"[" * 100_000
HUGE = b"1" + b"0" * 400
GOOD = b'{"step": 8, "train/loss": 0.5, "test/nll": null}\n'
NO_RECORDS = [
    b'{"step": "x"}',
    b'{"step": null}',
    b'{"step": [1]}',
    b'{"step": {}}',
    b'{"step": true}',
    b'{"step": 5.0}',
    b'{"step": -1}',
    b'{"step": NaN}',
    b'{"step": 1e999}',
    b'{"step": 9223372036854775808}',  # one more than the largest int64
    b'{"step": ' + HUGE + b"}",
    b'{"step": 1' + b"0" * 5000 + b"}",
    b'{"step": 4, "step": 8}',
    b'{"step": 4, "train/loss": "low"}',
    b'{"step": 4, "train/loss": true}',
    b'{"step": 4, "train/loss": [0.5]}',
    b'{"step": 4, "train/loss": Infinity}',
    b'{"train/loss": 0.5}',
    b"[]",
    b"8",
    b"null",
    b"",
    b"\0\0\0",
    b'{"step": 4, "\xff": 1}',
    DEEP,
    b'{"step": 4, "a": ' * 50_000,
    b'{"step": 4, "long": "' + b"x" * 10_000_000 + b'"}',
]
NO_OBJECTS = [b"null", b"[]", b"5", b'"x"', b"{", b"\xff", b'{"a": 1, "a": 2}', DEEP, HUGE, b""]
SUMMARY = b'{"steps": 8, "seconds": %s, "member_examples_per_second": 2.0}'


def writer_from(workdir, step):
    """The writer of a run that resumes from a step."""
    writer = JsonLines(workdir / "metrics.jsonl")
    writer.begin(RunInfo(None, [0], first_step=step, last_step=16, batch_size=8))
    return writer


def named(value):
    return repr(value[:40]) if isinstance(value, bytes) else None


@pytest.mark.quick
@pytest.mark.parametrize("line", NO_RECORDS, ids=named)
def test_a_line_that_is_no_record_is_dropped_and_told(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert read_metrics(tmp_path) == [{"step": 8, "train/loss": 0.5, "test/nll": None}] * 2
    assert "1 of 3 lines in" in caplog.text
    writer_from(tmp_path, step=8).close()
    assert path.read_bytes() == GOOD + GOOD
    assert len(caplog.records) == 2


@pytest.mark.quick
def test_lines_of_later_steps_and_a_last_one_without_its_end_are_dropped_in_silence(
    tmp_path, caplog
):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD + GOOD.replace(b"8", b"9") + GOOD[:20])
    writer_from(tmp_path, step=8).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == GOOD
    assert not caplog.records


def test_a_log_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(
        RunError, match="^The metrics could not be written to .*metrics.jsonl: is a d"
    ):
        writer_from(tmp_path, step=8)
    (tmp_path / "curves.json").write_text("{}")
    with pytest.raises(UserError, match="metrics.jsonl cannot be read for the report: .*Is a dir"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", [*NO_OBJECTS, b'{"steps": 8}', b'{"steps": [8]}'], ids=named)
def test_no_pace_is_read_from_a_summary_that_is_damaged(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    assert pace_before(tmp_path, 8) == {}


@pytest.mark.parametrize("seconds", [b'"x"', b"null", b"[1]", b"true", b"1e999", HUGE], ids=named)
def test_a_pace_is_a_number(tmp_path, seconds):
    (tmp_path / "summary.json").write_bytes(SUMMARY % b"1.5")
    assert pace_before(tmp_path, 8) == {"seconds": 1.5, "member_examples_per_second": 2.0}
    assert pace_before(tmp_path, 9) == {}
    (tmp_path / "summary.json").write_bytes(SUMMARY % seconds)
    assert pace_before(tmp_path, 8) == {}


@pytest.mark.parametrize("content", [*NO_OBJECTS, b'{"program": 1}'], ids=named)
def test_a_chosen_execution_that_is_damaged_is_forgotten(tmp_path, content):
    (tmp_path / "executions.json").write_bytes(content)
    assert decision_cache.kept_execution("program", tmp_path) is None
    decision_cache.keep_execution("program", "vmap", tmp_path)
    assert decision_cache.kept_execution("program", tmp_path) == "vmap"


@pytest.mark.parametrize("name", ["curves.json", "summary.json", "answers.json"])
@pytest.mark.parametrize("content", NO_OBJECTS, ids=named)
def test_a_report_names_the_file_that_it_cannot_read(tmp_path, name, content):
    (tmp_path / "curves.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} cannot be read for the report: .*Remove it; dist"):
        read_run(tmp_path)


def leave(workdir, summary, curves):
    (workdir / "summary.json").write_text(json.dumps(summary))
    (workdir / "curves.json").write_text(json.dumps(curves))


WRONG = [None, [], {}, 5, "x", True, [None], ["x"], [[1], [2]], {"ensemble": 5}, {"x": {"y": "z"}}]


PAIR = ("disagreement", "member_id")  # which are drawn together


@pytest.mark.parametrize("run", [classification(), regression(), minimal()], ids=lambda r: r.name)
def test_values_of_another_form_are_told_or_drawn_but_never_a_traceback(tmp_path, run):
    leave(tmp_path, run.summary, run.curves)
    assert read_run(tmp_path).curves == run.curves
    told, scores = [], minimal().summary
    damaged = [
        ("summary", key, run.summary | {key: wrong}, {}) for key in run.summary for wrong in WRONG
    ]
    for key in run.curves:
        beside = {name: run.curves[name] for name in PAIR if key in PAIR}
        damaged += [("curves", key, scores, beside | {key: wrong}) for wrong in WRONG]
    for of, key, summary, curves in damaged:
        leave(tmp_path, summary, curves)
        try:
            read = read_run(tmp_path)
        except UserError as error:
            told.append((f"{of}.json cannot be read for the report: ", repr(key), str(error)))
        else:
            write_page(tmp_path / "report.html", [read])
    assert all(what in error and key in error for what, key, error in told)
    assert len(told) > 5 * len(run.summary)


@pytest.mark.parametrize("member_id", [{}, {"member_id": [0]}])
def test_members_that_disagree_have_a_name_each(tmp_path, member_id):
    leave(tmp_path, {}, {"disagreement": [[0.0, 1.0], [1.0, 0.0]], **member_id})
    with pytest.raises(UserError, match="for the report: 'member_id' does not name each member"):
        read_run(tmp_path)


def test_curves_of_unequal_lengths_are_told(tmp_path):
    run = classification()
    for section, name in (("risk_coverage", "ensemble"), ("ood", "entropy")):
        curves = copy.deepcopy(run.curves)
        part = curves[section][name]
        (part["edges"] if isinstance(part, dict) else part).append(1.0)
        leave(tmp_path, run.summary, curves)
        with pytest.raises(UserError, match=f"the value of '{section}' does not have the form"):
            read_run(tmp_path)


@pytest.mark.parametrize("array", [np.zeros(()), np.zeros(3), np.full((1, 2, 2), "x")])
def test_pictures_are_arrays_of_numbers(tmp_path, array):
    (tmp_path / "curves.json").write_text("{}")
    np.save(tmp_path / "pictures.npy", array)
    told = "pictures.npy.* (holds float64.*, not pictures|has the type <U1).*evaluate --workdir="
    with pytest.raises(UserError, match=told):
        read_run(tmp_path)


def test_a_run_resumes_with_damage_in_all_that_it_reads_back(tmp_path, caplog):
    def trained(steps):
        values = {
            "steps": steps,
            "num_members": 2,
            "model": {"name": "mlp", "hidden_sizes": (4,)},
            "data": {"global_batch_size": 32},
        }
        return train(Experiment.from_dict(values), tmp_path)

    trained(2)
    with (tmp_path / "metrics.jsonl").open("ab") as log:
        log.write(b"".join(line + b"\n" for line in NO_RECORDS))
    for name in ("summary.json", "executions.json", "curves.json"):
        (tmp_path / name).write_bytes(DEEP)
    trained(2)
    trained(4)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [from_json(line)["step"] for line in lines] == [2, 2, 4, 4]
    told = [record for record in caplog.records if "are not records" in record.getMessage()]
    assert [record.args[:2] for record in told] == [(len(NO_RECORDS), len(NO_RECORDS) + 2)]
