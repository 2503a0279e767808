"""`Ensemble.from_step`: a step of one's own is trained, saved, scored and loaded like any other."""

import dataclasses
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import dist_ens as de
import networks
from conftest import COMMAND_ENVIRONMENT
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.networks import export_members
from dist_ens.ground.errors import RunError, UserError
from marked import long
from own_steps import (
    CASES,
    DQN,
    GAN,
    MEMBERS,
    SEED,
    STEPS,
    Case,
    gan_init,
    gan_step,
    layout_of,
    normals,
)


def assert_as_by_hand(case, state, history=None):
    """Compares parameters with those of the loop by hand, and the metrics of every step."""
    for position, member_id in enumerate(state.member_id.tolist()):
        expected, metrics = case.by_hand(member_id)
        found = networks.member_of(state.params, position)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        networks.assert_close_to_scale(found, expected)
        for record in history or ():
            for name, value in metrics[record["step"] - 1].items():
                mine = record[f"train/{name}/member_{member_id:02d}"]
                np.testing.assert_allclose(mine, value, rtol=1e-6)


@pytest.mark.parametrize("name", ["dqn", *long("gan", "graph")])
def test_a_step_of_ones_own_is_that_of_a_loop_by_hand_on_every_mesh(tmp_path, name):
    case, history = CASES[name], []
    # The run stops after each step, and is resumed on another mesh.
    for steps, mesh in enumerate(("2x2", "1x1", "4x1"), 1):
        ensemble = case.ensemble(layout=layout_of(mesh))
        options = {"steps_per_call": 1, "log_every": 1, "checkpoints": de.Checkpoints(tmp_path)}
        result = de.fit(ensemble, case.batches, steps=steps, progress=False, **options)
        history += result.history
    assert [record["step"] for record in history] == [1, 2, 3]
    assert_as_by_hand(case, result.state, history)
    run = de.load(tmp_path, ensemble=case.ensemble(layout=layout_of("2x2")))
    expected = [case.apply(case.by_hand(m)[0], case.inputs) for m in range(MEMBERS)]
    found = run.predict(case.inputs).members
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-5)


KILLED = """
import os, signal, sys
sys.path.insert(0, "tests")
import dist_ens as de, own_steps as here

def kill(info):
    if info.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

layout = here.layout_of("1x1")
checkpoints = de.Checkpoints(sys.argv[1], every_steps=1)
de.fit(here.DQN.ensemble(layout=layout), here.DQN.batches, steps=3, steps_per_call=1,
       checkpoints=checkpoints, callbacks=[kill], progress=False)
"""


def test_a_run_whose_process_was_killed_ends_as_one_by_hand(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=pathlib.Path(__file__).parent.parent,
        env=COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    # It was killed after its second step, and had saved the first one at the most.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name == "2"] == []
    ensemble = DQN.ensemble(layout=layout_of("4x1"))
    checkpoints = de.Checkpoints(tmp_path)
    result = de.fit(ensemble, DQN.batches, steps=3, checkpoints=checkpoints, progress=False)
    assert_as_by_hand(DQN, result.state)


@pytest.mark.parametrize(
    "settings",
    [
        {"execution": "loop"},
        {"waves": 2},
        {"num_members": 2, "member_ids": [3, 1], "layout": layout_of("1x1", 2)},
        *long(*({"execution": each} for each in ("unroll", "map", "chunk:2"))),
    ],
    ids=str,
)
def test_a_member_does_not_depend_on_execution_waves_and_other_members(settings):
    ensemble = GAN.ensemble(**({"layout": layout_of("1x1")} | settings))
    result = de.fit(ensemble, GAN.batches, steps=STEPS, steps_per_call=STEPS, progress=False)
    assert_as_by_hand(GAN, result.state)


def conv_init(key, batch):
    return {"kernel": 0.3 * jax.random.normal(key, (3, 3, 1, 2))}


def conv_apply(state, images):
    dims = ("NHWC", "HWIO", "NHWC")
    found = jax.lax.conv_general_dilated(
        images, state["kernel"], (1, 1), "SAME", dimension_numbers=dims
    )
    return jnp.tanh(found).mean(axis=(1, 2))


def conv_step(state, batch, key):
    def loss_of(state):
        logits = conv_apply(state, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    nll, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda leaf, grad: leaf - grad, state, grads), {"nll": nll}


IMAGES = {
    "inputs": normals(32, 6, 6, 1),
    "labels": np.random.default_rng(0).integers(0, 2, 32).astype(np.int32),
}
CONV = Case(conv_init, conv_step, conv_apply, [IMAGES] * STEPS, IMAGES["inputs"])


def test_auto_lowers_the_convolutions_of_a_step_and_trains_on_arrays():
    # A batch of all examples has the same mean in any order.
    ensemble = CONV.ensemble(execution="auto", layout=layout_of("1x1"))
    result = de.fit(ensemble, IMAGES, steps=3, batch_size=32, steps_per_call=3, progress=False)
    assert "+" in result.ensemble.execution  # such as unroll+canonical
    assert_as_by_hand(CONV, result.state)


# Scores


def test_the_outputs_are_scored_by_an_objective_or_the_state_by_a_loss():
    categorical = de.losses.categorical(2)
    plain = CONV.ensemble(layout=layout_of("1x1"))
    state = plain.init(IMAGES)
    logits = np.asarray(plain.apply(state, IMAGES["inputs"]), np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = probs[:, np.arange(32), IMAGES["labels"]]
    nll = -np.log(chosen.mean(axis=0)).mean()  # of the mean of the members' probabilities
    scores = de.evaluate(plain, state, IMAGES, objective=categorical)
    assert scores.ensemble["nll"] == pytest.approx(nll, rel=1e-5)
    assert scores.members[2]["nll"] == pytest.approx(-np.log(chosen[2]).mean(), rel=1e-5)

    def eval_loss(state, batch, key):
        largest = jnp.abs(state["kernel"]).max()
        return largest, {"noise": jax.random.normal(key), "size": batch["labels"].shape[0]}

    scores = de.evaluate(plain, state, IMAGES, eval_loss=eval_loss)
    kernels = np.abs(state.params["kernel"]).max(axis=(1, 2, 3, 4))
    assert [each["loss"] for each in scores.members] == pytest.approx(kernels.tolist())
    assert {each["size"] for each in scores.members} == {32}
    assert len({each["noise"] for each in scores.members}) == MEMBERS

    # `fit` scores by what the ensemble was made with, and so do its predictions.
    parts = {"init": conv_init, "step": conv_step, "apply": conv_apply, "objective": categorical}
    scored = de.Ensemble.from_step(num_members=MEMBERS, layout=layout_of("1x1"), **parts)
    result = de.fit(scored, IMAGES, steps=1, batch_size=32, eval_data=IMAGES, progress=False)
    same = plain.on(plain.layout, result.ensemble.execution)
    again = de.evaluate(same, result.state, IMAGES, objective=categorical)
    assert result.scores.ensemble == again.ensemble
    assert scored.predict(result.state, IMAGES["inputs"]).mean.sum(axis=1) == pytest.approx(1)


# Failures


def failing(value, *, has_loss=False):
    """An ensemble of which the members with `fails` get a value in the step from a batch of 1."""

    def init(key, batch):
        fails = jax.random.bernoulli(key, 0.5)
        return {"fails": fails, "w": jnp.float32(0), "mask": jnp.float32(-jnp.inf)}

    def step(state, batch, key):
        bad = state["fails"] & (batch == 1).any()
        new = jnp.where(bad, value, state["w"] + 1)
        if has_loss:
            return state | {"w": state["w"] + 1}, {"loss": new}
        return state | {"w": new}, {}

    return lambda policy: de.Ensemble.from_step(
        init=init,
        step=step,
        num_members=8,
        execution="vmap",
        failure_policy=policy,
        layout=layout_of("4x1", 8),
    )


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("policy", ["continue", "skip", "freeze", "drop", "raise"])
def test_a_step_fails_where_its_loss_or_its_new_state_is_not_finite(policy, has_loss):
    make = failing(np.inf, has_loss=has_loss)
    batches = [np.full((2, 1), n == 1, np.float32) for n in range(6)]

    def fit():
        return de.fit(make(policy), batches, steps=6, steps_per_call=1, progress=False)

    if policy == "raise":
        with pytest.raises(RunError, match="is not finite. The policy for failures is 'raise'"):
            fit()
        return
    result = fit()
    first = make(policy).init(batches[0])
    fails = np.asarray(first.params["fails"])
    assert 0 < fails.sum() < 8
    # The second of six steps is not taken by these members, and no later one if they are frozen.
    of_failed = {"continue": 6 if has_loss else np.inf, "skip": 5, "freeze": 1, "drop": 1}
    expected = np.where(fails, of_failed[policy], 6)
    np.testing.assert_array_equal(result.state.params["w"], expected)
    causes = {member.member_id: member.cause for member in result.failed_members}
    cause = "the loss is not finite" if has_loss else "the new state is not finite"
    if policy == "continue" and not has_loss:
        assert causes == {}
    elif policy != "continue":
        assert causes == dict.fromkeys(np.flatnonzero(fails).tolist(), cause)


# Members of saved runs


def test_members_of_a_run_are_selected_merged_and_loaded(tmp_path):
    layout = layout_of("1x1")

    def trained(name, **settings):
        ensemble, folder = GAN.ensemble(layout=layout, **settings), tmp_path / name
        checkpoints = de.Checkpoints(folder)
        de.fit(ensemble, GAN.batches, steps=STEPS, checkpoints=checkpoints, progress=False)
        return folder, ensemble

    folder, ensemble = trained("a")
    copy_members([folder], tmp_path / "some", member_ids=[3, 1])
    some = GAN.ensemble(num_members=2, member_ids=[3, 1], layout=layout_of("1x1", 2))
    run = de.load(tmp_path / "some", ensemble=some)
    assert_as_by_hand(GAN, run.state)
    part = de.load(folder, ensemble=ensemble, members=[3, 1])
    predictions = [each.predict(GAN.inputs).members for each in (part, run)]
    np.testing.assert_allclose(*predictions, rtol=0, atol=1e-6)  # of outputs up to about 1
    others, _ = trained("b", member_ids=[4, 5, 6, 7])
    copy_members([tmp_path / "some", others], tmp_path / "whole")
    whole = GAN.ensemble(num_members=6, member_ids=[3, 1, 4, 5, 6, 7], layout=layout_of("1x1", 6))
    assert_as_by_hand(GAN, de.load(tmp_path / "whole", ensemble=whole).state)
    with pytest.raises(UserError, match=r"made in Python: its step is gan_step. Give them again"):
        de.load(folder)


def test_the_parameters_are_exported_as_they_are_whatever_optimizer_is_in_the_state(tmp_path):
    # An Ensemble exports the averages of such an optimizer. Here `apply` would compute them.
    optimizer = optax.contrib.schedule_free_sgd(0.1)

    def init(key, batch):
        w = jax.random.normal(key, (3,))
        return {"w": w, "opt": optimizer.init(w)}

    def step(state, batch, key):
        updates, opt = optimizer.update(state["w"] - batch.mean(axis=0), state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}

    ensemble = de.Ensemble.from_step(
        init=init, step=step, num_members=2, execution="vmap", layout=layout_of("1x1", 2)
    )
    checkpoints = de.Checkpoints(tmp_path / "run")
    result = de.fit(ensemble, normals(8, 3), steps=2, checkpoints=checkpoints, progress=False)
    paths = export_members(tmp_path / "run", tmp_path / "networks")
    found = [load_file(path)["w"] for path in paths]
    np.testing.assert_array_equal(found, result.state.params["w"])


def test_another_step_does_not_resume_a_run_and_another_score_does(tmp_path):
    def fit(steps, step, **scores):
        settings = {"num_members": MEMBERS, "seed": SEED, "layout": layout_of("1x1")}
        ensemble = de.Ensemble.from_step(init=gan_init, step=step, **settings, **scores)
        checkpoints = de.Checkpoints(tmp_path)
        return de.fit(ensemble, GAN.batches, steps=steps, checkpoints=checkpoints, progress=False)

    def other(state, real, key):
        return gan_step(state, 2 * real, key)

    other.__qualname__ = gan_step.__qualname__
    fit(1, gan_step)
    with pytest.raises(UserError, match="the training step computes something else"):
        fit(STEPS, other)
    resumed = fit(STEPS, gan_step, eval_loss=lambda state, batch, key: (0.0, {}))
    assert_as_by_hand(GAN, resumed.state)


# Wrong uses


def returning(change):
    return lambda state, batch, key: change(*gan_step(state, batch, key))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"init": lambda key, batch: batch["x"]}, "could not be initialised on .* TypeError: "),
        ({"step": returning(lambda state, _: state)}, r"The step returned a dict. It must be step"),
        (
            {"step": returning(lambda state, m: (jax.tree.map(jnp.float16, state), m))},
            r"a state of \['d'\]\[0\] float16\[2, 8\].*, and it was given one of .* float32",
        ),
        (
            {"step": returning(lambda state, m: (state, {"all": jnp.zeros(3)}))},
            r"The metric 'all' of the step is float32\[3\], and it must be one real",
        ),
    ],
    ids=["init", "no metrics", "other state", "metric"],
)
def test_a_wrong_use_is_refused_in_one_sentence(parts, message):
    parts = {"init": gan_init, "step": gan_step} | parts
    ensemble = de.Ensemble.from_step(num_members=4, layout=layout_of("1x1"), **parts)
    with pytest.raises(UserError, match=message) as raised:
        de.fit(ensemble, GAN.batches, steps=1, progress=False)
    assert str(raised.value).endswith(".")


def test_members_that_cannot_predict_or_be_scored_say_what_to_give():
    ensemble = dataclasses.replace(GAN, apply=None).ensemble(layout=layout_of("1x1"))
    state = ensemble.init(GAN.batches[0])
    with pytest.raises(UserError, match="no apply. Give one to as_member or Ensemble.from_step"):
        ensemble.predict(state, GAN.inputs)
    told = "a step of its own and nothing to score it by. Give from"
    with pytest.raises(UserError, match=told):
        de.evaluate(ensemble, state, GAN.batches[0])
    with pytest.raises(UserError, match=told):
        de.fit(ensemble, GAN.batches[0], steps=1, validation=0.25, progress=False)
    network = (lambda key: {"w": jnp.ones((2, 2))}, lambda params, x: x @ params["w"])
    usual = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), num_members=2)
    with pytest.raises(UserError, match="score an ensemble of Ensemble.from_step. Leave them out"):
        de.evaluate(usual, usual.init(IMAGES), IMAGES, objective=de.losses.categorical(2))
