"""Every example runs, and shows what it says it shows."""

import functools
import pathlib
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def assert_members_differ(member_logits):
    for logits in member_logits[1:]:
        assert np.abs(logits - member_logits[0]).max() > 0.1


def assert_good_ensemble(scores, *, accuracy):
    assert accuracy < scores.ensemble["accuracy"] <= 1
    # Jensen: -log of a mean of probabilities is below the mean of their -log, as members differ.
    assert 0 < scores.ensemble["nll"] < scores.mean_member["nll"]


@pytest.mark.long
def test_a_list_of_mlps_is_stacked_trained_and_averaged():
    shown = load("list_of_mlps")["main"]()
    assert shown["vmap_error"].startswith("vmap got inconsistent sizes for array axes to be mapped")
    assert shown["stack_error"].startswith("Member 4 cannot be stacked with member 0: leaf [0][0]")
    np.testing.assert_allclose(shown["untrained"], shown["untrained_one_by_one"], atol=1e-5)
    assert_members_differ(shown["untrained"])

    assert shown["losses"][-1] < shown["losses"][0] / 4
    assert shown["accuracy"] > 0.93
    assert shown["nll"] < shown["member_nll"].mean()
    np.testing.assert_allclose(shown["probs"], shown["member_probs"].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(shown["probs"].sum(axis=1), 1, atol=1e-5)


def test_a_function_of_one_image_serves_a_batch_and_an_ensemble():
    shown = load("one_image_function")["main"]()
    assert shown["equal"]
    assert shown["by_hand"].shape == (32, 4, 10)  # [batch, members, classes]
    assert shown["lifted"].shape == (4, 32, 10)  # [members, batch, classes]
    # Image 3, member 1, in each of the three ways.
    alone = shown["one_by_one"][3, 1]
    np.testing.assert_allclose(shown["by_hand"][3, 1], alone, atol=1e-5)
    np.testing.assert_allclose(shown["lifted"][1, 3], alone, atol=1e-5)
    assert_members_differ(shown["lifted"])


@pytest.mark.long
def test_plain_jax_and_linen_members_are_trained_by_the_same_loop():
    shown = load("mnist_plain_jax_to_linen")["main"]()
    assert_good_ensemble(shown["plain"], accuracy=0.92)
    assert_good_ensemble(shown["linen"], accuracy=0.955)

    # A member leaves the ensemble as a TrainState of Flax.
    inside = [member["accuracy"] for member in shown["linen"].members]
    np.testing.assert_allclose(shown["train_state_accuracies"], inside, atol=1e-6)

    state = shown["train_states"][2]
    assert int(state.step) == 300
    assert set(state.params) == {"Dense_0", "BatchNorm_0", "Dense_1"}
    variance = np.asarray(state.batch_stats["BatchNorm_0"]["var"])
    assert np.abs(variance - 1).max() > 0.1  # flax starts it at 1: it has moved

    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    assert int(state.step) == 301
    assert int(state.opt_state[0].count) == 301  # Adam's own count came with it


@pytest.mark.long
def test_a_registered_class_is_trained_and_its_gradient_is_an_instance():
    example = load("registered_class")
    mlp_class, shown = example["Mlp"], example["main"]()
    assert "'UnregisteredMlp'" in shown["unregistered_error"]
    assert "register_dataclass" in shown["unregistered_error"]

    assert type(shown["gradient"]) is mlp_class
    assert max(np.abs(g).max() for g in jax.tree.leaves(shown["gradient"])) > 1e-3
    assert type(shown["params"]) is mlp_class
    assert [w.shape for w in shown["params"].weights] == [(4, 64, 50), (4, 50, 10)]

    # One step of SGD by hand is the ensemble's first step.
    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(assert_close, shown["by_hand"], shown["lifted"])
    assert shown["losses"][-1] < shown["losses"][0] / 4
    assert_good_ensemble(shown["scores"], accuracy=0.94)


@pytest.mark.long
def test_members_that_fail_are_restarted_by_a_callback_and_the_others_do_not_notice():
    example = load("restart_members")
    result = example["main"](progress=False)
    failed = {member.member_id for member in result.failed_members}
    assert 0 < len(failed) < 8
    assert not result.state.failures.is_frozen.any()
    assert result.history[-1]["train/loss"] < 10
    options = {"steps": 200, "batch_size": 32, "progress": False}
    others = sorted({*range(8)} - failed)
    plain = de.fit(result.ensemble, example["DATA"], **options).state
    found, expected = (de.select_members(state, others).params for state in (result.state, plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.long
def test_optuna_suggests_the_settings_of_the_members_and_is_told_their_scores():
    shown = load("optuna_sweep")["main"]()
    trials = shown["study"].trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 64
    for name, values in shown["hyper"].items():
        np.testing.assert_array_equal([trial.params[name] for trial in trials], values)
    assert len({trial.value for trial in trials}) == 64
    chosen = shown["chosen"]
    assert sum(chosen.weights) == pytest.approx(1)
    assert shown["study"].best_trial.number == chosen.choices[0]  # Greedy begins with the best.
    assert chosen.path[-1] < chosen.path[0]
    assert shown["scores"].ensemble["nll"] < shown["best"]["nll"]


@pytest.mark.torch
def test_a_torch_data_loader_feeds_an_ensemble():
    shown = load("torch_dataloader")["main"]()
    # 1437 training digits hold 11 whole batches of 128; 15 epochs.
    assert len(shown["losses"]) == 11 * 15
    np.testing.assert_array_equal(shown["steps"], [165] * 4)
    assert shown["losses"][-1] < shown["losses"][0] / 5
    assert_good_ensemble(shown["scores"], accuracy=0.955)


@pytest.mark.torch
def test_the_order_of_a_torch_epoch_depends_on_key_and_epoch_alone():
    key_sampler = load("torch_dataloader")["KeySampler"]

    def orders(key, epochs):
        sampler = key_sampler(100, key)
        result = []
        for epoch in epochs:
            sampler.epoch = epoch
            result.append(list(sampler))
        return result

    key = jax.random.key(0)
    run = orders(key, range(4))
    assert orders(key, [2, 3]) == run[2:]  # a run that goes on from epoch 2
    assert all(sorted(order) == list(range(100)) for order in run)
    assert len({tuple(order) for order in run}) == 4
    assert orders(jax.random.key(1), [0]) != run[:1]


def test_without_torch_its_example_says_what_to_install(monkeypatch):
    for name in ("torch", "torch.utils", "torch.utils.data"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"pip install 'dist-ens\[torch\]'"):
        load("torch_dataloader")


@pytest.mark.long
def test_adapters_on_one_transformer_learn_another_text():
    before, after = load("adapters")["main"](steps=20)
    # Adapters begin as no change, so that all members are the base.
    nlls = [member["nll"] for member in before.members]
    np.testing.assert_allclose(nlls, nlls[0], rtol=1e-5)
    assert after.ensemble["nll"] < after.mean_member["nll"] < before.ensemble["nll"]
