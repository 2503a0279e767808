"""The line that shows the progress of a run."""

import io
import re
import time

import numpy as np
from rich.console import Console

from dist_ens.callbacks import ProgressBar, RunInfo, StepInfo, progress
from dist_ens.evaluation import Scores

RUN = RunInfo(None, member_ids=[0, 1], first_step=0, last_step=20_000, batch_size=8)


def after(step, losses):
    metrics = {} if losses is None else {"loss": np.array([losses], np.float32)}
    return StepInfo(step, None, metrics, is_last=False, metrics_step=step)


def printed(bar, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(bar)
    return console.file.getvalue().rstrip()


OF_WIDTH = {
    80: r"step  5,000/20,000  ━━╸ +  25%  loss 0\.5000  0:00:0\d left  [\d,.]+ steps/s",
    40: r"step  5,000/20,000  25%  loss 0\.5000",
    30: r"step  5,000/20,000  25%",
    20: r"step  5,000/20,000",
    10: "",
}


def test_the_line_says_compiling_before_the_first_call_and_leaves_out_what_does_not_fit():
    bar = ProgressBar(Console(file=io.StringIO()))
    bar.begin(RUN)
    assert printed(bar, 80).endswith("  0%  compiling")
    bar(after(4_000, [2.0, 2.0]))
    time.sleep(0.01)
    bar(after(5_000, [0.25, 0.75]))  # 5,000 of 20,000 steps are 25 %, and the mean loss is 0.5.
    for width, shown in OF_WIDTH.items():
        assert re.fullmatch(shown, printed(bar, width))
    bar(after(6_000, None))
    assert "loss 0.5000" in printed(bar, 80)


def test_a_pipe_gets_a_line_at_each_interval_and_one_for_each_evaluation(monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_SECS", 0.05)
    scores = Scores([{"accuracy": 0.75, "nll": 0.5}], [{"member_id": 0, "accuracy": 0.5, "nll": 1}])
    file = io.StringIO()
    bar = ProgressBar(Console(file=file, width=40))
    bar.begin(RUN._replace(last_step=20))
    for step in range(1, 21):
        bar(after(step, [0.25, 0.75]))
        time.sleep(0.01)
        if step % 10 == 0:  # Evaluations come sooner than lines are due.
            bar.evaluated(step, scores)
    bar.evaluated(21, Scores([{}], [{"member_id": 0, "loss": 0.125}]))  # A loss of the user's own.
    lines = file.getvalue().splitlines()
    assert [line for line in lines if " of the " in line] == [
        "step 10: accuracy 0.7500, NLL 0.5000 of the ensemble",
        "step 20: accuracy 0.7500, NLL 0.5000 of the ensemble",
        "step 21: loss 0.1250 of the mean member",
    ]
    # The 20 calls take at least 0.2 s, in which a line is due every 0.05 s or so.
    steps = [line for line in lines if " of the " not in line]
    assert len(steps) >= 3
    # A line is longer than the 40 columns, and not wrapped.
    line = r"step [ \d]\d/20  \d+%  loss 0\.5000  0:00:0\d left  [\d.]+ steps/s"
    assert all(re.fullmatch(line, step) for step in steps)
