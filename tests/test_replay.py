"""One member of a run, trained once more and alone."""

import math

import numpy as np
import pytest

from dist_ens.config import Experiment
from dist_ens.errors import UserError
from dist_ens.experiment import replay as replaying
from dist_ens.experiment.replay import Replay, replay
from dist_ens.experiment.train import train
from launch.replay import _sentence


def trained(workdir, **fields):
    experiment = Experiment.from_dict(
        {
            "num_members": 8,
            "steps": 6,
            "seed": 11,
            "execution": "loop",
            "data": {"global_batch_size": 32, "std": (16.0,), "examples": "permuted"},
            "model": {"name": "mlp", "hidden_sizes": (8,)},
            "loss": {"mixup": 0.2},
            "checkpoint": {"every_steps": 3, "keep": 2},
            "layout": {"ensemble_axis": 8},
        }
        | fields
    )
    return train(experiment, workdir)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    trained(folder)
    return folder


@pytest.mark.parametrize(("until", "step"), [(None, 6), (3, 3)])
def test_a_member_of_eight_devices_trained_alone_on_one_has_the_same_bits(workdir, until, step):
    found = replay(workdir, 2, until=until, progress=False)
    assert (found.member, found.step, found.execution) == (2, step, "loop")
    assert found.num_leaves > 6
    assert found.differences == {}
    assert "has the same bits as in the run" in _sentence(found)


def test_another_member_is_another_network(workdir, monkeypatch):
    one_further = replaying.select_members
    monkeypatch.setattr(
        replaying, "select_members", lambda state, where: one_further(state, [where[0] + 1])
    )
    found = replay(workdir, 1, progress=False)
    assert found.largest[1] > 0.1
    assert "params.0.w" in found.differences
    assert "differs from the one in the run" in _sentence(found)


def test_a_member_that_is_not_there_is_told(workdir):
    with pytest.raises(
        UserError, match=r"no member 8 in .*: the ids are \[0, 1, 2, 3, 4, 5, 6, 7\]"
    ):
        replay(workdir, 8)


def test_a_difference_is_relative_to_the_largest_value_of_the_run():
    saved = np.array([1.0, -4.0], np.float32)
    assert replaying._difference(saved, saved.copy()) is None
    # 0.5 of 4.
    assert replaying._difference(saved, np.array([1.5, -4.0], np.float32)) == 0.125
    assert math.isnan(replaying._difference(saved, np.array([1.0, np.nan], np.float32)))
    # Zero and minus zero are different bits of equal numbers.
    assert replaying._difference(np.zeros(1, np.float32), -np.zeros(1, np.float32)) == 0.0


def test_nan_counts_as_the_largest_difference():
    found = Replay(0, 1, "vmap", {"a": 0.5, "b": math.nan, "c": 2.0}, 3)
    assert found.largest[0] == "b"
    assert not found.largest[1] <= 1.0
    assert "most in b: by NaN in one of the two" in _sentence(found)
