"""One member of a run, trained once more and alone."""

import types

import pytest

import failing
from commands import dist_ens
from dist_ens.callbacks import EarlyStopping, stop_members
from dist_ens.experiment import Experiment
from dist_ens.experiment import replay as replaying
from dist_ens.experiment.config_file import OwnParts
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.storage import place_of
from failing import ensemble
from launch import members as launch_members
from launch.replay import _sentence


def experiment(**fields):
    values = {"num_members": 8, "steps": 6, "seed": 11, "execution": "loop"}
    values |= {"data": {"global_batch_size": 32, "std": (16.0,), "examples": "permuted"}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (8,)}, "loss": {"mixup": 0.2}}
    values |= {"checkpoint": {"every_steps": 3, "keep": 2}, "layout": {"ensemble_axis": 8}}
    return Experiment.from_dict(values | fields)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    train(experiment(), folder)
    return folder


@pytest.mark.parametrize(("until", "step"), [(None, 6), (3, 3)])
def test_a_member_of_eight_devices_trained_alone_on_one_has_the_same_bits(workdir, until, step):
    found = replay(workdir, 2, until=until, progress=False)
    assert (found.member, found.step, found.execution) == (2, step, "loop")
    assert found.num_leaves > 6
    assert found.differences == {}
    assert "has the same bits as in the run" in _sentence(found)


@pytest.mark.parametrize("rules", ["fsdp", '[("*w", ("model",))]'])
def test_a_member_that_devices_share_is_trained_by_as_many_again(rules, tmp_path):
    layout = {"ensemble_axis": 4, "model_axis": 2, "model_rules": rules}
    train(experiment(layout=layout, model={"name": "mlp", "hidden_sizes": (8,)}), tmp_path)
    assert replay(tmp_path, 2, progress=False).differences == {}


class StopsTwo:
    stops_members = True

    def __call__(self, info):
        return stop_members([2]) if info.step >= 3 else None


def test_a_member_that_was_stopped_is_listed_and_replayed_until_then(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    train(experiment(steps_per_call=3), run, parts=OwnParts(callbacks=[StopsTwo()]))
    with pytest.raises(UserError, match="Member 2 was stopped at step 3, and took no more"):
        replay(run, 2, progress=False)
    assert replay(run, 2, until=3, progress=False).differences == {}
    assert replay(run, 3, progress=False).differences == {}
    monkeypatch.setattr(launch_members, "_STEP", types.SimpleNamespace(value=None))
    launch_members._list(place_of(run, "run"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "stopped at step 3" in line]
    assert [line.split()[1] for line in lines] == ["2"]


@pytest.mark.long
def test_a_member_that_has_its_best_parameters_cannot_be_compared(tmp_path):
    early = EarlyStopping("accuracy", patience=9, of="members")
    values = experiment(
        num_members=1,
        layout={},
        optimizer={"learning_rate": 3.0},
        evaluation={"every_steps": 1},
        steps_per_call=1,
    )
    train(values, tmp_path / "run", parts=OwnParts(callbacks=[early]))
    with pytest.raises(UserError, match=r"best evaluation, at step \d, and the rest"):
        replay(tmp_path / "run", 0, progress=False)


def test_another_member_is_another_network(workdir, monkeypatch):
    opened = replaying.open_finished

    def one_further(*arguments, member_ids, **others):
        own = opened(*arguments, member_ids=member_ids, **others)
        other = opened(*arguments, member_ids=[member_ids[0] + 1], **others)
        return own._replace(state=other.state)

    monkeypatch.setattr(replaying, "open_finished", one_further)
    found = replay(workdir, 1, progress=False)
    assert found.largest[1] > 0.1
    assert "params.0.w" in found.differences
    assert "differs from the one in the run" in _sentence(found)


def test_a_run_whose_random_numbers_another_version_drew_is_refused(workdir, monkeypatch):
    monkeypatch.setattr("dist_ens.experiment.record.KEY_RULE", 3)
    with pytest.raises(UserError, match="a run of another version of dist_ens"):
        replay(workdir, 2, progress=False)


def test_a_member_that_was_frozen_is_compared_though_its_training_ends_early():
    made = ensemble("freeze")
    saved, alone = (
        failing.trained(made, [2], steps=steps).state.select([failing.FAILING]) for steps in (6, 4)
    )
    compared = replaying._at_same_step(saved, alone, failing.FAILING)
    assert replaying._differences(saved, compared) == {}


def test_a_member_that_is_not_there_is_told(workdir):
    with pytest.raises(UserError, match="The run has the members 0-7, and \\[8\\] were asked for"):
        replay(workdir, 8)


@pytest.mark.faults
@pytest.mark.parametrize("execution", ["loop", "map", "chunk:2", "vmap", "unroll"])
def test_the_command_replays_a_member_of_a_run_of_every_execution(
    tmp_path, execution, record_property
):
    run = tmp_path / "run"
    words = ["train", "--config=configs/digits.py", f"--workdir={run}", "--config.num_members=8"]
    words += ["--config.steps=20", "--config.model.hidden_sizes=(32,)"]
    ended = dist_ens(*words, f"--config.execution={execution}", xla_flags="")
    assert ended.returncode == 0, ended.stderr
    ended = dist_ens("replay", run, "--member=7", xla_flags="")
    record_property("replayed execution", execution)
    record_property("exit code", ended.returncode)
    record_property("said", ended.stdout.splitlines()[-1])
    has_same_bits = "has the same bits as in the run" in ended.stdout
    assert ended.returncode == (ExitCode.DONE if has_same_bits else ExitCode.FAULT), ended.stderr
    if execution in ("loop", "map"):
        assert has_same_bits, ended.stdout
    else:
        again = dist_ens("replay", run, "--member=7", "--tolerance=0.02", xla_flags="")
        assert again.returncode == ExitCode.DONE, again.stdout
