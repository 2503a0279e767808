"""`evaluate` with a loss function: the loss of the whole set, as evaluation computes it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.ground.errors import UserError
from dist_ens.losses import Ratio, batch_mean

pytestmark = pytest.mark.quick

ROWS = 2501


def rows_of(count=ROWS):
    """Returns a set whose mask is not spread evenly: three of four rows count among the first."""
    random = np.random.default_rng(0)
    x = np.sort(random.normal(size=count)).astype(np.float32)
    y = (x**2).astype(np.float32)
    mask = random.random(count) < np.linspace(0.75, 0.02, count)
    return {"x": x, "y": y, "mask": mask.astype(np.float32), "last": np.arange(count) >= count - 5}


def init(key, batch):
    return {"w": jax.random.normal(key)}, ()


def loss_fn(params, model_state, batch, key):
    errors = jnp.abs(params["w"] * batch["x"] - batch["y"])
    distances = jnp.abs(errors[:, None] - errors[None])
    scalars = {
        "last": batch_mean(errors, weights=batch["last"]),
        "root": jnp.sqrt(jnp.square(errors).mean()),
        "sum": errors.sum() / 100,
        "pairs": distances.mean(),
    }
    return batch_mean(errors, weights=batch["mask"]), (model_state, scalars)


def by_numpy(w, rows):
    """The values of `loss_fn` for one member, by NumPy."""
    errors = np.abs(np.float64(w) * rows["x"] - rows["y"])
    return {
        "loss": np.average(errors, weights=rows["mask"]),
        "last": errors[-5:].mean(),
        "root": np.sqrt(np.square(errors).mean()),
        "sum": errors.sum() / 100,
        "pairs": np.abs(errors[:, None] - errors[None]).mean(),
    }


def ensemble_of(loss, mesh=(1, 1), num_members=2, member=None, **options):
    devices = jax.devices()[: mesh[0] * mesh[1]]
    options["layout"] = de.Layout.make(num_members, ensemble_axis=mesh[0], devices=devices)
    member = member or de.as_member(init=init)
    return de.Ensemble(member, optax.sgd(0.1), loss, num_members=num_members, **options)


@pytest.mark.parametrize(("mesh", "waves"), [((1, 1), 1), ((2, 2), 1), ((1, 2), 2)], ids=str)
def test_the_loss_of_a_set_is_that_of_all_its_rows(mesh, waves):
    methods = [de.methods.adversarial(0.1, key="x")]  # Methods are for training alone.
    ensemble = ensemble_of(loss_fn, mesh, num_members=4, waves=waves, methods=methods)
    rows = rows_of()
    state = ensemble.init(rows)
    scores = de.evaluate(ensemble, state, rows)
    for member, w in zip(scores.members, np.asarray(state.params["w"]), strict=True):
        expected = by_numpy(w, rows)
        assert {name: member[name] for name in expected} == pytest.approx(expected, rel=1e-5)


# A set that does not fit in memory: the loss below makes an array of rows times rows.

MANY = 100_000


def loss_with_much_memory(ratio):
    """Returns a loss whose means are a `Ratio`, or numbers."""

    def loss(params, model_state, batch, key):
        errors = jnp.abs(params["w"] * batch["x"] - batch["y"])
        is_larger = (errors[:, None] > errors[None]).astype(jnp.float32)
        # No row is larger than itself, so a product of the ones alone would be less than rows.
        share = 2 * len(errors) + (is_larger @ jnp.ones(len(errors)) < len(errors)).sum()
        three = Ratio(share, len(errors)) if ratio else share / len(errors)
        scalars = {"three": three, "large": Ratio((errors > 1).sum(), len(errors))}
        return batch_mean(errors, batch["mask"], ratio=ratio), (model_state, scalars)

    return loss


@pytest.mark.slow
def test_a_set_that_does_not_fit_in_memory_is_scored_in_parts():
    rows = rows_of(MANY + 1)
    ensemble = ensemble_of(loss_with_much_memory(ratio=True), (1, 2), waves=2)
    state = ensemble.init(rows)
    scores = de.evaluate(ensemble, state, rows, batch_size=500)
    for member, w in zip(scores.members, np.asarray(state.params["w"]), strict=True):
        errors = np.abs(np.float64(w) * rows["x"] - rows["y"])
        assert member["loss"] == pytest.approx(np.average(errors, weights=rows["mask"]), rel=1e-5)
        assert member["large"] == pytest.approx((errors > 1).mean(), rel=1e-4)
        assert member["three"] == pytest.approx(3)  # (2 rows + rows) / rows


def test_what_cannot_be_scored_in_parts_is_refused_before_training():
    rows, ensemble = rows_of(MANY), ensemble_of(loss_with_much_memory(ratio=False))
    message = (
        "The evaluation data has 100,000 examples, which need more than half of the free memory.*"
        "cannot be computed in parts: 'loss', 'three'. Return batch_mean"
    )
    with pytest.raises(UserError, match=message):
        de.fit(ensemble, rows_of(), steps=1, eval_data=rows, progress=False)
    with pytest.raises(UserError, match=message):
        de.evaluate(ensemble, ensemble.init(rows), rows)


def test_each_group_of_members_is_scored_on_its_own_examples():
    rows = rows_of(8)
    ensemble = ensemble_of(loss_fn, num_members=4, num_groups=2)
    state = ensemble.init(rows)
    scores = de.evaluate(ensemble, state, rows)
    for member, w in zip(scores.members, np.asarray(state.params["w"]), strict=True):
        # Members 0 and 2 are in the first group, whose examples are the first half.
        half = slice(0, 4) if member["member_id"] % 2 == 0 else slice(4, 8)
        of_group = {name: leaf[half] for name, leaf in rows.items()}
        expected = by_numpy(w, of_group)["root"]
        assert member["root"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_evaluations_during_training_score_the_whole_set():
    rows, ensemble = rows_of(), ensemble_of(loss_fn)
    stopping = de.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    options = {"eval_data": rows, "eval_every": 2, "callbacks": [stopping], "progress": False}
    result = de.fit(ensemble, rows, steps=6, **options)
    assert result.step == 4  # The second score is not better by so much.
    expected = [by_numpy(w, rows)["loss"] for w in np.asarray(result.state.params["w"])]
    [last] = [record for record in result.history if record["step"] == 4 and "test/loss" in record]
    assert last["test/loss"] == pytest.approx(np.mean(expected), rel=1e-5)


# Training and evaluation: dropout, and the statistics of batches.


class Network(nn.Module):
    """A network with dropout and batch statistics, either of which can be left out."""

    rate: float = 0.5
    norm: bool = True

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(1)(x)[..., 0]


def examples(count=64):
    x = np.random.default_rng(0).normal(loc=2, size=(count, 3)).astype(np.float32)
    return {"inputs": x, "y": x.sum(axis=1)}


def loss_of(network):
    def loss(params, model_state, batch, key, train):
        variables, rngs = {"params": params, **model_state}, {"dropout": key}
        outputs, model_state = network.apply(
            variables, batch["inputs"], train, rngs=rngs, mutable=["batch_stats"]
        )
        value = jnp.square(outputs - batch["y"]).mean()
        return value, (dict(model_state), {"is_training": 1.0 * train})

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), pytest.param((2, 1), marks=pytest.mark.long)], ids=str)
def test_a_loss_that_takes_train_is_evaluated_in_the_mode_of_evaluation(mesh):
    network, data = Network(), examples()
    ensemble = ensemble_of(loss_of(network), mesh, member=network)
    options = {"log_every": 1, "eval_data": data, "progress": False}
    result = de.fit(ensemble, data, steps=3, batch_size=32, **options)
    assert result.history[0]["train/is_training"] == 1
    state = jax.device_get(result.state)
    for number, member in enumerate(result.scores.members):
        variables = {"params": state.params, **state.model_state}
        variables = jax.tree.map(lambda leaf, i=number: leaf[i], variables)
        outputs = network.apply(variables, data["inputs"], False)
        expected = np.square(outputs - data["y"]).mean()
        assert (member["loss"], member["is_training"]) == (pytest.approx(expected, rel=1e-5), 0)


@pytest.mark.parametrize(
    ("network", "found"),
    [(Network(norm=False), "draws from its key"), (Network(rate=0.0), "changes the model state")],
    ids=["dropout", "statistics"],
)
def test_a_loss_that_would_be_evaluated_as_in_training_is_refused(network, found):
    def loss(params, model_state, batch, key):
        return loss_of(network)(params, model_state, batch, key, True)

    data, ensemble = examples(), ensemble_of(loss, member=network)
    message = rf"^The loss function {found} in evaluation, .* batch, key, train\)\."
    with pytest.raises(UserError, match=message):
        de.evaluate(ensemble, ensemble.init(data), data)
    with pytest.raises(UserError, match=message):
        de.fit(ensemble, data, steps=1, validation=0.5, progress=False)
    de.fit(ensemble, data, steps=1, progress=False)  # Nothing is evaluated.


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: functools.partial(loss, train=False),
        lambda loss: lambda p, s, b, k: jax.jit(loss, static_argnums=4)(p, s, b, k, False),
        lambda loss: lambda p, s, b, k: jax.checkpoint(loss, static_argnums=4)(p, s, b, k, False),
    ],
    ids=["plain", "jit", "remat"],
)
def test_a_loss_that_uses_neither_key_nor_statistics_of_a_batch_needs_no_train(transform):
    network, data = Network(norm=False), examples()
    ensemble = ensemble_of(transform(loss_of(network)), member=network)
    assert np.isfinite(de.evaluate(ensemble, ensemble.init(data), data).mean_member["loss"])
