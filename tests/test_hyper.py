"""Settings that differ from member to member: what they are, who reads them, and what they cost."""

import dataclasses
import json

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dist_ens as de
from dist_ens.experiment import Experiment, load
from dist_ens.experiment.members import copy_members, extend
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import INIT, key_of_step, member_key
from dist_ens.members import from_example_functions
from saving import assert_same

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(64, 5)).astype(np.float32)
LABELS = (np.arange(64) % 3).astype(np.int32)
DATA = {"inputs": INPUTS, "labels": LABELS}
SETTINGS = {
    "learning_rate": de.hyper.log_uniform(1e-4, 1e-1),
    "decay": np.logspace(-5, -2, 64),
    "dropout": de.hyper.choice(0.0, 0.1, 0.3),
}


def init(key, inputs):
    first, second = jax.random.split(key)
    return {
        "first": jax.random.normal(first, (5, 8)) / 2,
        "second": jax.random.normal(second, (8, 3)) / 3,
    }, ()


def apply(params, model_state, inputs, key, train, hyper):
    hidden = jnp.tanh(inputs @ params["first"])
    if train:
        hidden = de.models.dropout(hidden, hyper["dropout"], key)
    return hidden @ params["second"], model_state


def adamw(hyper):
    return optax.adamw(hyper["learning_rate"], weight_decay=hyper["decay"])


def sweep(num_members=64, hyper=None, **options):
    hyper = SETTINGS if hyper is None else hyper
    objective = de.losses.categorical(3)
    return de.Ensemble(
        (init, apply), adamw, objective, num_members=num_members, hyper=hyper, **options
    )


def fitted(ensemble, steps=20, **options):
    options = {"steps_per_call": 1} | options
    return de.fit(ensemble, DATA, steps=steps, batch_size=16, progress=False, **options)


def test_a_member_is_that_of_a_loop_by_hand_with_its_settings():
    ensemble = sweep(execution="vmap")
    batch = {"inputs": INPUTS[:16], "labels": LABELS[:16]}
    state = ensemble.init(batch)
    for _ in range(20):
        state, _ = ensemble.update(state, batch)
    own = {name: float(values[17]) for name, values in ensemble.hyper.items()}
    assert own["decay"] == pytest.approx(np.logspace(-5, -2, 64)[17], rel=1e-6)
    key, optimizer = member_key(0, 17), optax.adamw(own["learning_rate"], weight_decay=own["decay"])
    params, _ = init(jax.random.fold_in(key, INIT), None)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, number):
        def loss(params):
            outputs, _ = apply(params, (), batch["inputs"], key_of_step(key, number), True, own)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()

        updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(20):
        params, opt_state = step(params, opt_state, number)
    for name, values in params.items():
        np.testing.assert_allclose(state.params[name][17], values, rtol=1e-6, atol=1e-6)


def test_a_member_has_the_same_settings_and_bits_in_an_ensemble_of_another_size():
    hyper = SETTINGS | {"decay": de.hyper.log_uniform(1e-5, 1e-2)}

    def of_members(ids):
        layout = de.Layout.make(len(ids), devices=jax.devices()[:1])
        return sweep(len(ids), hyper=hyper, member_ids=ids, layout=layout, execution="loop")

    whole, alone = of_members(range(14, 22)), of_members([17])
    for name, values in sweep(hyper=hyper).hyper.items():
        assert alone.hyper[name] == values[17] == whole.hyper[name][3]
    found, expected = fitted(alone).state, fitted(whole).state
    assert_same(found.params, jax.tree.map(lambda leaf: leaf[3:4], expected.params))


def test_a_drawn_value_depends_on_the_seed_the_name_and_the_id_alone():
    drawn = {"learning_rate": de.hyper.uniform(0, 1), "decay": de.hyper.uniform(0, 1)}
    few, many = (sweep(count, hyper=drawn).hyper for count in (4, 64))
    np.testing.assert_array_equal(few["decay"], many["decay"][:4])
    assert len({*many["decay"].tolist(), *many["learning_rate"].tolist()}) == 128
    assert (sweep(4, hyper=drawn, seed=1).hyper["decay"] != few["decay"]).all()


@pytest.mark.parametrize(
    "drawn", [de.hyper.uniform(2, 3), de.hyper.log_uniform(1e-3, 10), de.hyper.choice(1, 4)]
)
def test_draws_follow_their_distribution(drawn):
    values = sweep(4000, hyper={"decay": drawn}).hyper["decay"]
    bounds = drawn.at(np.array([0.0, 0.5]))
    assert bounds[0] <= values.min()
    assert (values < bounds[1]).mean() == pytest.approx(0.5, abs=0.03)


def test_all_values_are_served_by_one_program_that_costs_what_one_value_costs():
    lowered = []

    def note(event, secs, **facts):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    fitted(sweep(execution="vmap"), steps_per_call=5)
    jax.monitoring.unregister_event_duration_listener(note)
    assert lowered.count("jit(update)") == 1, lowered

    def cost(ensemble):
        batch = {"inputs": INPUTS, "labels": LABELS}
        step = ensemble.programs.step
        of_all = jax.jit(jax.vmap(lambda state: step(state, batch, None)), donate_argnums=0)
        compiled = of_all.lower(ensemble.abstract_state(batch)).compile()
        return {name: compiled.cost_analysis()[name] for name in ("flops", "bytes accessed")}

    def shared(params, model_state, inputs, key, train):
        return apply(params, model_state, inputs, key, train, {"dropout": 0.1})

    same = de.Ensemble((init, shared), optax.adamw(1e-3), de.losses.categorical(3), num_members=64)
    of_each, of_one = cost(sweep()), cost(same)
    assert all(of_each[name] <= 1.02 * of_one[name] for name in of_one), (of_each, of_one)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, hyper):
        return hyper["scale"] * nn.Dense(3)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x, hyper):
        return hyper["scale"] * self.layer(x)


class Equinox(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, key):
        self.layer = eqx.nn.Linear(5, 3, key=key)

    def __call__(self, x, hyper):
        return hyper["scale"] * self.layer(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Own:
    w: jax.Array

    def __call__(self, x, hyper):
        return hyper["scale"] * (x @ self.w)


def short(params, x, hyper):
    return hyper["scale"] * (x @ params["w"])


def weights(key):
    return {"w": jax.random.normal(key, (5, 3))}


@pytest.mark.parametrize(
    "network",
    [
        Linen(),
        lambda rngs: Nnx(rngs),
        lambda key: Equinox(key),
        hk.transform(lambda x, hyper: hyper["scale"] * hk.Linear(3)(x)),
        lambda key: Own(weights(key)["w"]),
        (weights, short),
        from_example_functions(weights, short),
    ],
    ids=["linen", "nnx", "equinox", "haiku", "class", "functions", "example"],
)
def test_a_network_of_any_library_is_given_the_settings(network):
    objective = de.losses.squared_error()
    options = {"execution": "vmap", "num_members": 2}
    scales = de.Ensemble(network, optax.sgd(0.1), objective, hyper={"scale": [1.0, 3.0]}, **options)
    state = scales.init({"inputs": INPUTS, "labels": INPUTS[:, :3]})
    state = state._replace(params=jax.tree.map(lambda leaf: leaf.at[1].set(leaf[0]), state.params))
    first, second = scales.apply(state, INPUTS)
    np.testing.assert_allclose(second, 3 * first, rtol=1e-5, atol=1e-6)


def test_a_loss_a_method_and_a_step_of_ones_own_are_given_the_settings():
    def loss(params, model_state, batch, key, hyper):
        return hyper["factor"] * (params["w"] ** 2).mean(), (model_state, {})

    def scaled(inner):
        def of_method(params, model_state, batch, info):
            value, rest = inner(params, model_state, batch, info)
            return info.hyper["factor"] * value, rest

        return of_method

    def step(state, batch, key, hyper):
        return state, {"loss": hyper["factor"]}

    options = {"num_members": 2, "hyper": {"factor": [1.0, 2.0]}}
    network = de.as_member(init=lambda key, inputs: ({"w": jnp.ones(3)}, ()))
    ensembles = {
        1: de.Ensemble(network, optax.sgd(0.0), loss, **options),
        2: de.Ensemble(network, optax.sgd(0.0), loss, methods=(scaled,), **options),
    }
    for power, ensemble in ensembles.items():
        _, metrics = ensemble.update(ensemble.init(DATA), DATA)
        np.testing.assert_allclose(metrics["loss"], [1.0, 2.0**power])
    own = de.Ensemble.from_step(init=lambda key, batch: {"w": jnp.ones(3)}, step=step, **options)
    np.testing.assert_allclose(own.update(own.init(DATA), DATA)[1]["loss"], [1.0, 2.0])
    scores = de.evaluate(ensembles[1], ensembles[1].init(DATA), DATA)
    assert [member["loss"] for member in scores.members] == [1.0, 2.0]
    assert scores.hyper == {"factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (8, {"failure_policy": "skip"}),
        (8, {"failure_policy": "skip", "execution": "loop"}),
        (8, {"waves": 2, "execution": "vmap"}),
        (8, {"execution": "unroll"}),
        (2, {}),
    ],
    ids=str,
)
def test_settings_reach_every_execution(rows, options):
    hyper = SETTINGS | {"decay": np.logspace(-5, -2, 8)}
    plain = fitted(sweep(8, hyper=hyper, execution="map"))
    layout = de.Layout.make(8, ensemble_axis=rows)
    found = fitted(sweep(8, hyper=hyper, layout=layout, **options))
    for name, values in plain.state.params.items():
        np.testing.assert_allclose(found.state.params[name], values, rtol=1e-4, atol=1e-5)


def test_a_run_resumes_with_its_settings_and_not_with_others(tmp_path):
    whole = fitted(sweep(8, hyper=SETTINGS | {"decay": 0.01}, execution="loop"))
    ensemble = sweep(8, hyper=SETTINGS | {"decay": 0.01}, execution="loop")
    first = fitted(ensemble, steps=10, checkpoints=de.Checkpoints(tmp_path), log_every=1)
    assert first.history[0]["hyper/decay/member_03"] == pytest.approx(0.01)
    resumed = fitted(ensemble, checkpoints=de.Checkpoints(tmp_path))
    assert_same(resumed.state, whole.state)
    others = sweep(8, hyper=SETTINGS | {"decay": 0.02})
    with pytest.raises(UserError, match=r"holds another run: hyper is .*decay.* there and"):
        fitted(others, checkpoints=de.Checkpoints(tmp_path))
    # If that is asked for, the members are trained with the others from here on.
    still = SETTINGS | {"decay": 0.0, "learning_rate": 0.0}
    rest = sweep(8, hyper=still, execution="loop")
    anyway = de.Checkpoints(tmp_path, resume="anyway")
    again = fitted(rest, steps=30, checkpoints=anyway)
    assert_same(again.state.params, whole.state.params)
    np.testing.assert_array_equal(again.state.hyper["learning_rate"], np.zeros(8))
    assert again.history[0]["step"] == 20
    assert again.history[0]["hyper/decay/member_03"] == 0
    fewer = de.Ensemble(
        (init, apply),
        lambda hyper: optax.adamw(hyper["learning_rate"]),
        de.losses.categorical(3),
        num_members=8,
        hyper={"learning_rate": 0.0, "dropout": 0.0},
    )
    with pytest.raises(UserError, match="resume='anyway' takes other values of the same names"):
        fitted(fewer, steps=40, checkpoints=anyway)


def test_a_run_from_a_state_records_its_settings():
    ensemble = sweep(2, hyper=SETTINGS | {"decay": 0.01})
    first = fitted(ensemble, steps=4)
    rest = fitted(ensemble, steps=8, state=first.state, log_every=4)
    assert [record["step"] for record in rest.history if "hyper/decay/member_01" in record] == [4]


CONFIG = {
    "num_members": 4,
    "steps": 10,
    "data": {"global_batch_size": 32, "std": (16.0,)},
    "model": {"name": "mlp_bn_dropout", "hidden_sizes": (8,)},
    "optimizer": {"name": "sgd", "momentum": 0.5, "clip_norm": 1.0},
    "hyper": {
        "learning_rate": "log_uniform(1e-3, 1e-1)",
        "momentum": "choice(0.5, 0.9)",
        "weight_decay": (0.0, 1e-4, 1e-3, 1e-2),
        "clip_norm": 2.0,
        "dropout_rate": "uniform(0, 0.5)",
    },
}


def test_a_config_gives_settings_that_scores_and_files_show(tmp_path):
    trained = train(Experiment.from_dict(CONFIG), tmp_path / "a")
    hyper = trained.ensemble.hyper
    assert sorted(hyper) == sorted(CONFIG["hyper"])
    assert hyper["weight_decay"].tolist() == pytest.approx([0.0, 1e-4, 1e-3, 1e-2])
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["hyper"]["dropout_rate"] == pytest.approx(hyper["dropout_rate"].tolist())
    assert "momentum" in str(trained.scores)
    loaded = load(tmp_path / "a")
    assert_same(loaded.state.hyper, trained.state.hyper)
    assert np.isfinite(loaded.predict(np.zeros((2, 8, 8), np.uint8)).mean).all()


def test_copies_of_two_runs_keep_their_own_settings(tmp_path):
    for seed, name in enumerate("ab"):
        train(Experiment.from_dict(CONFIG | {"seed": seed}), tmp_path / name)
    copy_members([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    both, *own = (load(tmp_path / name) for name in ("both", "a", "b"))
    for name, values in both.state.hyper.items():
        expected = np.concatenate([each.state.hyper[name] for each in own])
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(both.ensemble.hyper[name], expected)
    # A member with another id there is trained alone with its own settings.
    found = replay(tmp_path / "both", 5, progress=False)
    assert max(found.differences.values(), default=0) < 1e-5


def test_a_text_of_numbers_is_a_list_whose_members_keep_their_own():
    given = Experiment.from_dict({"steps": 1, "num_members": 2, "hyper": {"decay": "[0.1, 0.2]"}})
    assert given.with_members([1]).hyper.options == {"decay": (0.2,)}


def test_a_state_with_other_settings_is_refused():
    state = fitted(sweep(4, hyper=SETTINGS | {"decay": 0.1})).state
    with pytest.raises(UserError, match=r"The given state has hyper\['decay'\]=\[0.1"):
        fitted(sweep(4, hyper=SETTINGS | {"decay": 0.2}), state=state)


@pytest.mark.parametrize("name", ["learing_rate", "b1"])
def test_a_config_with_a_setting_that_nothing_reads_is_told(tmp_path, name):
    told = rf"Nothing reads hyper.{name}.*hyper may have clip_norm, dropout_rate, learning_rate"
    config = CONFIG | {"hyper": {name: 0.1}}
    with pytest.raises(UserError, match=told):
        train(Experiment.from_dict(config), tmp_path / "a")


def test_a_report_draws_scores_over_settings_and_over_each_two_of_them(tmp_path):
    report = de.callbacks.Report(tmp_path)
    fitted(sweep(8, hyper=SETTINGS | {"decay": 0.1}), eval_data=DATA, callbacks=[report])
    page = (tmp_path / "report.html").read_text()
    for alt in ("NLL of each member over learning rate", "by dropout and learning rate"):
        assert alt in page


def test_members_that_are_added_have_the_settings_of_the_larger_ensemble(tmp_path):
    drawn = {"learning_rate": "log_uniform(1e-3, 1e-1)"}
    train(Experiment.from_dict(CONFIG | {"hyper": drawn}), tmp_path / "a")
    extend(tmp_path / "a", [4, 6], tmp_path / "b")
    state = load(tmp_path / "b").state
    expected = Experiment.from_dict(CONFIG | {"hyper": drawn, "num_members": 8})
    rates = sweep(8, hyper=expected.hyper.options).hyper["learning_rate"]
    np.testing.assert_array_equal(state.hyper["learning_rate"], rates[[0, 1, 2, 3, 4, 6]])
    copy_members([tmp_path / "b"], tmp_path / "c", member_ids=[6, 1])
    extend(tmp_path / "c", [5], tmp_path / "d")
    state = load(tmp_path / "d").state
    np.testing.assert_array_equal(state.hyper["learning_rate"], rates[[6, 1, 5]])


@pytest.mark.parametrize(
    ("hyper", "told"),
    [
        ({"decay": [1.0, 2.0]}, r"hyper\['decay'\] has the shape \[2\], and there are 4 members"),
        ({"decay": "log_unifrm(1, 2)"}, "Did you mean 'log_uniform'"),
        ({"decay": "uniform(2, 1)"}, "uniform.2, 1. has no values. Give bounds with low < high"),
        ({"decay": object()}, r"hyper\['decay'\] is an object, and not finite numbers"),
        ({"decay": np.full(4, 1j)}, r"hyper\['decay'\] is an array, and not finite numbers"),
        ({"decay": np.nan}, r"hyper\['decay'\] is a float, and not finite numbers"),
        ([0.1], "hyper is a list. Give a dict from names to values"),
        ({"rate": 0.1}, r"hyper\['learning_rate'\] is read, and hyper has rate"),
        (
            SETTINGS | {"decay": 0.1, "lr": 0.1},
            r"Nothing reads hyper\['lr'\]; read of hyper are: decay, dropout, learning_rate",
        ),
    ],
)
def test_wrong_settings_are_told_in_a_sentence(hyper, told):
    with pytest.raises(UserError, match=told):
        fitted(sweep(4, hyper=hyper))


def test_a_network_that_branches_on_a_setting_is_told_what_to_use():
    class Branching(nn.Module):
        @nn.compact
        def __call__(self, x, train, hyper):
            x = nn.Dropout(hyper["dropout"], deterministic=not train)(x)
            return nn.Dense(3)(x)

    hyper = SETTINGS | {"decay": 0.01}
    ensemble = de.Ensemble(Branching(), adamw, de.losses.categorical(3), num_members=2, hyper=hyper)
    with pytest.raises(UserError, match=r"dist_ens\.models\.dropout\(x, rate, key\)"):
        fitted(ensemble)


@pytest.mark.parametrize(
    "bounds", [(0.0, 1.0), (2.0, 1.0), (np.nan, 1.0), (1e-60, 1e-50), (1.0, 1e300)]
)
def test_wrong_bounds_are_told_where_they_are_given(bounds):
    with pytest.raises(UserError, match="log_uniform"):
        de.hyper.log_uniform(*bounds)
