"""Every optimizer of Optax trains an ensemble as it trains one member after another."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dist_ens as de
from batch_programs import normals
from dist_ens.ground.randomness import INIT, OPTIMIZER, key_of_optimizer, member_key
from marked import long
from networks import ensemble_of, layout_on

MEMBERS, STEPS, BATCH, CLASSES, SEED = 4, 5, 8, 3, 7
_RANDOM = np.random.default_rng(0)
INPUTS = _RANDOM.normal(size=(STEPS, BATCH, 6)).astype(np.float32)
LABELS = _RANDOM.integers(0, CLASSES, (STEPS, BATCH)).astype(np.int32)
BATCHES = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]


# The optimizers of Optax, each with arguments that let this network learn.
_USUAL = """
    adabelief adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb nadam nadamw novograd
    optimistic_adam optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sm3 yogi
"""
OPTIMIZERS = {
    **{name: getattr(optax, name)(1e-2) for name in _USUAL.split()},
    **{name: getattr(optax, name)(1e-3) for name in ("lion", "sign_sgd", "signum")},
    **{name: getattr(optax, name)() for name in ("lbfgs", "polyak_sgd")},  # value, value_fn
    **{
        name: getattr(contrib, name)(1e-2)
        for name in ("acprop", "ademamix", "adopt", "madgrad", "muon", "schedule_free_adamw")
    },
    **{
        name: getattr(contrib, name)()
        for name in ("cocob", "dadapt_adamw", "dog", "dowg", "momo", "momo_adam", "prodigy")
    },
    "adadelta": optax.adadelta(1.0),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=2),
    "flatten": optax.flatten(optax.adam(1e-2)),
    "galore": contrib.galore(1e-2, rank=2, update_proj_gap=2),
    "lars": optax.lars(1.0),
    "mechanize": contrib.mechanize(optax.sgd(0.1), s_init=0.1),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=jax.random.key(3)),
    "sam": contrib.sam(optax.sgd(0.1), contrib.normalize()),
    "schedule_free": contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_sgd": contrib.schedule_free_sgd(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "simplified_ademamix": contrib.simplified_ademamix(1e-4),
    "sophia": contrib.sophia(1e-2, update_interval=2),  # obj_fn
}

# Those that take more than a gradient, and usual ones. The others are tested in long runs.
SHORT = ["adamw", "apply_if_finite", "lbfgs", "noisy_sgd", "polyak_sgd", "sam", "sgd"]


def is_bias(params):
    """Returns a mask that is True for the biases of the network."""
    return {name: name.startswith("b") for name in params}


class ByHand:
    """An optimizer that is no optimizer of Optax: `init` and `update`, and an attribute."""

    learning_rate = 0.1

    def init(self, params):
        return {"count": jnp.zeros((), jnp.int32)}

    def update(self, grads, state, params):
        updates = jax.tree.map(lambda g, p: -self.learning_rate * (g + 0.01 * p), grads, params)
        return updates, {"count": state["count"] + 1}


class Langevin(ByHand):
    """An optimizer whose update takes the loss and the member's own key."""

    def update(self, grads, state, params, *, value, key):
        noise = {name: jax.random.normal(key, leaf.shape) for name, leaf in grads.items()}
        updates = jax.tree.map(lambda g, n: -0.1 * g / (1 + value) + 0.01 * n, grads, noise)
        return updates, {"count": state["count"] + 1}


# Optimizers made of others, and of the user's own.
COMBINED = {
    "add_noise": optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(5)), optax.sgd(0.1)),
    "chain with masks": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(np.invert, is_bias(p))),
        optax.freeze({"w1": False, "b1": True, "w2": False, "b2": False}),
        optax.sgd(0.1),
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 4), weight_decay=0.1
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "multi_transform": optax.multi_transform(
        {True: optax.adam(1e-2), False: contrib.muon(1e-2)}, is_bias
    ),
    "sam in opaque mode": contrib.sam(  # grad_fn
        optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
    ),
    "a backtracking line search": optax.chain(  # value, grad and value_fn
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
    ),
    "an object": ByHand(),
    "an object with value and key": Langevin(),
}


def init(key, inputs):
    return normals(key, 0.5, w1=(6, 8), b1=(8,), w2=(8, CLASSES), b2=(CLASSES,)), ()


@functools.cache
def first_params(member_id):
    return init(jax.random.fold_in(member_key(SEED, member_id), INIT), INPUTS[0])[0]


def outputs(params, inputs):
    return jnp.tanh(inputs @ params["w1"] + params["b1"][None]) @ params["w2"] + params["b2"][None]


def apply(params, model_state, inputs, key, train):
    return outputs(params, inputs), model_state


def trained(optimizer):
    """Returns the ensemble and its state after five steps."""
    parts = (init, apply), optimizer, layout_on((2, 2), MEMBERS), de.losses.categorical(CLASSES)
    ensemble = ensemble_of(*parts, seed=SEED)
    state = ensemble.state_of([first_params(number) for number in range(MEMBERS)])
    for batch in BATCHES:
        state, _ = ensemble.update(state, batch)
    return ensemble, state


def loss_by_hand(params, batch):
    logits = outputs(params, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def with_own_key(state, key):
    """Returns an optimizer's state with the member's key in place of the optimizer's."""

    def own(leaf):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return key_of_optimizer(key, jax.random.bits(leaf, (2,), jnp.uint32))

    return jax.tree.map(own, state)


def trained_by_hand(optimizer):
    """Returns each member's parameters, optimizer state and gradients, trained one by one."""

    @jax.jit
    def step(params, state, batch, key):
        def loss(params, key=None):
            return loss_by_hand(params, batch)

        value, grads = jax.value_and_grad(loss)(params)
        extra = {"value": value, "key": key}
        if optimizer is COMBINED["sam in opaque mode"]:
            extra = {"grad_fn": lambda params, number: jax.grad(loss)(params)}
        elif optimizer is OPTIMIZERS["sophia"]:
            extra = {"obj_fn": loss}
        elif optimizer in (OPTIMIZERS["lbfgs"], COMBINED["a backtracking line search"]):
            extra |= {"grad": grads, "value_fn": loss}
        elif optimizer is OPTIMIZERS["sam"] or not isinstance(
            optimizer, optax.GradientTransformationExtraArgs | Langevin
        ):
            extra = {}
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, grads

    members = []
    for member_id in range(MEMBERS):
        key, params, gradients = member_key(SEED, member_id), first_params(member_id), []
        state = with_own_key(optimizer.init(params), key)
        for number, batch in enumerate(BATCHES):
            of_step = jax.random.fold_in(jax.random.fold_in(key, OPTIMIZER), number)
            params, state, grads = step(params, state, batch, of_step)
            gradients.append(grads)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
        members.append(SimpleNamespace(params=params, opt_state=state, gradients=stacked))
    return members


def num_left_out(state, members):
    """Compares all parameters, and returns how many had too small a gradient to compare.

    Where a gradient is 0 in truth, an optimizer that divides by its size turns the sign of a
    rounding error into a whole step.
    """
    count = 0
    for number, member in enumerate(members):
        for name, expected in member.params.items():
            gradients = np.abs(member.gradients[name])
            axes = tuple(range(1, gradients.ndim))
            compared = (gradients >= 1e-6 * gradients.max(axes, keepdims=True)).all(axis=0)
            count += compared.size - compared.sum()
            found, expected = np.asarray(state.params[name][number]), np.asarray(expected)
            assert np.isfinite(expected).all()
            difference = np.abs(found - expected)[compared].max(initial=0)
            assert difference <= 1e-4 * np.abs(expected).max(), (number, name, difference)
    return count


@pytest.mark.parametrize("name", [*long(*sorted(OPTIMIZERS.keys() - SHORT)), *SHORT, *COMBINED])
def test_four_members_are_trained_as_one_after_another(name):
    optimizer = (OPTIMIZERS | COMBINED)[name]
    members = trained_by_hand(optimizer)
    _, state = trained(optimizer)
    # Of 83 parameters each, at most one had a gradient that was nearly 0 at some step.
    assert num_left_out(state, members) <= 1
    first = first_params(0)
    moved = [np.abs(members[0].params[name] - first[name]).max() for name in first]
    assert max(moved) > 1e-6  # else nothing was compared


averaged = contrib.schedule_free_eval_params


def averaged_part(state, params, names):
    """Returns parameters of which those with some names are averages."""
    part = {name: params[name] if name in names else optax.MaskedNode() for name in params}
    return params | {name: averaged(state, part)[name] for name in names}


def of_label(state, label):
    return state.inner_states[label].inner_state


# Optimizers that evaluate other parameters than they train, and those parameters by hand.
EVALUATED = {
    "schedule_free_sgd": (OPTIMIZERS["schedule_free_sgd"], averaged),
    "two groups": (
        optax.partition(
            {
                True: contrib.schedule_free_sgd(0.3, b1=0.6),
                False: optax.chain(optax.clip(0.5), contrib.schedule_free_sgd(0.1)),
            },
            is_bias,
        ),
        lambda state, params: averaged_part(
            of_label(state, False)[1],
            averaged_part(of_label(state, True), params, ["b1", "b2"]),
            ["w1", "w2"],
        ),
    ),
    # After five steps, sam is between two updates of the outer optimizer.
    "sam": (OPTIMIZERS["sam"], lambda state, params: state.cache),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_an_ensemble_predicts_with_the_parameters_for_evaluation_of_its_optimizer(name):
    optimizer, for_evaluation = EVALUATED[name]
    ensemble, state = trained(optimizer)
    member_probs = []
    for member in trained_by_hand(optimizer):
        params = for_evaluation(member.opt_state, member.params)
        member_probs.append(jax.nn.softmax(outputs(params, INPUTS[0])))
        difference = member_probs[-1] - jax.nn.softmax(outputs(member.params, INPUTS[0]))
        assert np.abs(difference).max() > 1e-3  # else the test would see no difference
    mean = np.mean(member_probs, axis=0)
    found = ensemble.predict(state, INPUTS[0])
    np.testing.assert_allclose(found.members, member_probs, atol=1e-5)
    np.testing.assert_allclose(found.mean, mean, atol=1e-5)
    scores = de.evaluate(ensemble, state, BATCHES[0], intervals=False)
    nll = -np.log(mean[np.arange(BATCH), LABELS[0]]).mean()
    assert scores.ensemble["nll"] == pytest.approx(nll, abs=1e-5)
