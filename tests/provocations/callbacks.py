"""How the messages of `dist_ens.callbacks` are provoked."""

import errno

import pytest

from dist_ens.callbacks import EarlyStopping, JsonLines, Report, RunInfo
from dist_ens.callbacks.protocol import call_hook
from dist_ens.errors import UserError
from provocations._parts import raises


def _run(**directions):
    eval_every = 10 if directions else None
    return RunInfo(None, [0, 1], 0, 20, 8, directions=directions, eval_every=eval_every)


def a_patience_of_none():
    EarlyStopping(patience=0)


def a_direction_that_is_unknown():
    EarlyStopping(direction="down")


def early_stopping_without_data_to_score():
    EarlyStopping().begin(_run())


def early_stopping_without_scores_during_training():
    EarlyStopping().begin(_run(nll="lower")._replace(eval_every=None))


def early_stopping_by_a_score_that_is_not_there():
    EarlyStopping("accuracy").begin(_run(nll="lower", crps="lower"))


def early_stopping_by_a_score_without_a_direction():
    stopping = EarlyStopping("width")
    stopping.begin(_run(width=None))
    with pytest.raises(UserError):
        stopping.evaluated(10, {"width": 0.5})
    stopping._sign()


def a_disk_that_is_full(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "metrics.jsonl")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dist_ens.callbacks.json_lines.write_run_file", full)
    lines.begin(_run())


def a_callback_that_raises():
    class Plots:
        finished = raises

    call_hook(Plots(), "finished", 10, None, None, None)


def a_report_without_data_to_score(tmp_path):
    Report(tmp_path).begin(_run())
