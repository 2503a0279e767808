"""A loss that is no mean over examples, with batch statistics and dropout, on every mesh.

The loss tells each example from all others of the batch. So it, the statistics and the masks would
differ between meshes if a step saw a part of the batch.
"""

import contextlib
import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
import failing
import networks
from dist_ens.experiment import Experiment, OwnParts, open_source
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError
from dist_ens.members import from_linen
from marked import long


class Encoder(nn.Module):
    """Smooth, and without a bias whose gradient is 0, so that rounding stays rounding."""

    @nn.compact
    def __call__(self, x, train):
        x = x[..., :4].reshape(len(x), -1)  # `failing` puts no data in the other inputs.
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(4)(nn.Dropout(0.3, deterministic=not train)(nn.tanh(x)))


MEMBER = from_linen(Encoder())
DATA = {"inputs": np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)}


def info_nce(params, model_state, batch, key, train):
    """InfoNCE of two views, whose dropout differs."""
    views = []
    for number in range(2):
        view_key = jax.random.fold_in(key, number) if train else None
        view, model_state = MEMBER.apply(params, model_state, batch["inputs"], view_key, train)
        views.append(view)
    scores = views[0] @ views[1].T
    return -jnp.diagonal(jax.nn.log_softmax(scores)).mean(), (model_state, {})


def ensemble_on(mesh, num_members=4, member=MEMBER, loss=info_nce, **options):
    layout = networks.layout_on(mesh, num_members)
    return networks.ensemble_of(member, networks.SGD, layout, loss, **options)


def assert_same(found, expected):
    """Checks that parameters and statistics are equal up to rounding, relative to each leaf."""
    networks.assert_close_to_scale(
        *((state.params, state.model_state) for state in (found, expected))
    )


def fit(ensemble, **options):
    options = {"batch_size": 16, "steps_per_call": 1, "log_every": 1, "progress": False} | options
    return de.fit(ensemble, DATA, **options)


def killed_at(step):
    """A callback that ends the process in the middle of a run, as far as `fit` can tell."""

    def callback(info):
        if info.step == step:
            raise OSError("killed")

    return callback


def test_a_run_that_is_killed_and_resumed_on_other_meshes_is_the_same(tmp_path):
    meshes = [(4, 2), (1, 2), (2, 4), (1, 1)]
    steps = 2 * len(meshes)
    for number, mesh in enumerate(meshes):
        is_last = mesh is meshes[-1]
        saves = de.Checkpoints(tmp_path, every_steps=2, every_secs=None)
        # It has taken one more step than it has saved.
        killed = [] if is_last else [killed_at(2 * number + 3)]
        with contextlib.nullcontext() if is_last else pytest.raises(RunError, match="killed"):
            resumed = fit(ensemble_on(mesh), steps=steps, callbacks=killed, checkpoints=saves)
    whole = fit(ensemble_on((1, 1)), steps=steps)
    assert resumed.step == whole.step == steps
    assert [each["step"] for each in resumed.history] == [steps - 1, steps]
    assert_same(resumed.state, whole.state)
    last, expected = (each.history[-1]["train/loss"] for each in (resumed, whole))
    assert last == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rows", [1, *long(2)])
def test_a_member_of_a_run_on_a_data_axis_is_replayed_alone_on_one_device(rows, tmp_path):
    parts = OwnParts(member=MEMBER, loss=info_nce)
    values = {"num_members": 8, "steps": 4, "execution": "vmap", "layout": {"ensemble_axis": rows}}
    values |= {"optimizer": {"name": "sgd", "learning_rate": 0.1}}
    values |= {"data": {"global_batch_size": 32}}
    train(Experiment.from_dict(values), tmp_path / "run", parts=parts)
    config = SimpleNamespace(own_parts=lambda spec: parts, open_source=open_source)
    found = replay(tmp_path / "run", 7, config=config, progress=False)
    assert found.differences  # They are other programs, so it is no copy.
    assert found.largest[1] < 1e-5


def with_policy(policy, mesh):
    return ensemble_on(mesh, failing.MEMBERS, methods=(failing.failing,), failure_policy=policy)


@pytest.mark.parametrize("policy", ["drop", *long("skip", "freeze")])
def test_a_policy_for_failures_does_the_same_on_every_mesh(policy, tmp_path):
    def ended(mesh):
        """The run after a failure at step 2, and its resumption for two more steps."""
        made, results = with_policy(policy, mesh), []
        for steps in (3, 5):
            saves = de.Checkpoints(tmp_path / str(mesh))
            results.append(failing.trained(made, [2], steps=steps, checkpoints=saves))
        return results

    (first, last), *others = map(ended, [(1, 1), (2, 2), (1, 4)])
    for other_first, other_last in others:
        assert other_first.failed_members == first.failed_members != ()
        assert_same(other_first.state, first.state)
        assert_same(*(each.state.select(failing.OTHERS) for each in (other_last, last)))


def test_the_policy_raise_ends_a_run_on_a_data_axis():
    with pytest.raises(RunError, match="Member 3 failed at step 2"):
        failing.trained(with_policy("raise", (2, 2)), [2], steps=4)


def init_sampling(key, inputs):
    return {"w": jax.random.normal(key, (2, 6, 3))}, ()


def apply_sampling(params, model_state, inputs, key, train):
    """A variational network, which is sampled wherever it is given a key."""
    mean, scale = (inputs @ w for w in params["w"])
    if key is None:
        return mean, model_state
    return mean + jnp.exp(scale) * jax.random.normal(key, mean.shape), model_state


SAMPLING = de.as_member(init=init_sampling, apply=apply_sampling)
ASKING = networks.Asking(3)
CLASSIFIES = de.losses.categorical(3)


def of_predictions(member, mesh):
    ensemble = ensemble_on(mesh, 2, member, CLASSIFIES, dropout_samples=2)
    state = ensemble.init(DATA)
    for count in (7, 3):
        predicted = ensemble.predict(state, DATA["inputs"][:count])
        assert predicted.members.shape[:2] == (2, count)
        yield from (predicted.members, predicted.mean)


def of_scores(mesh):
    ensemble = ensemble_on(mesh, 2, ASKING, CLASSIFIES, dropout_samples=2)
    data = {**DATA, "labels": np.arange(len(DATA["inputs"])) % 3}
    # Ten examples do not divide over eight columns.
    scores = de.evaluate(ensemble, ensemble.init(DATA), data, batch_size=10)
    for each in (scores.ensemble, *scores.members):
        yield from each.values()


def of_scores_of_a_loss(mesh):
    def loss(params, model_state, batch, key, train):
        """The bound of a variational network, which is sampled in evaluation too."""
        outputs, _ = SAMPLING.apply(params, model_state, batch["inputs"], key, train)
        return jnp.square(outputs).sum(), (model_state, {"largest": outputs.max()})

    ensemble = ensemble_on(mesh, 2, SAMPLING, loss)
    for each in de.evaluate(ensemble, ensemble.init(DATA), DATA).members:
        yield from each.values()


@pytest.mark.parametrize(
    ("found", "rtol"),
    [
        (functools.partial(of_predictions, SAMPLING), 1e-6),
        (of_scores_of_a_loss, 1e-6),
        *long((of_scores, 1e-5), (functools.partial(of_predictions, ASKING), 1e-6)),
    ],
    ids=["variational", "scores of a loss", "scores", "dropout"],
)
def test_what_is_sampled_is_the_same_on_every_mesh(found, rtol):
    one, *others = ([*found(mesh)] for mesh in [(1, 1), (2, 2), (1, 4), (1, 8)])
    for other in others:
        for array, expected in zip(other, one, strict=True):
            np.testing.assert_allclose(array, expected, rtol=rtol, atol=1e-6)
