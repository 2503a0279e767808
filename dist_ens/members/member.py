"""`Member`, its checks, and its transformations, such as one that scales labels."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State, described, leaf_name, require_arrays
from dist_ens.ground.types import (
    Inputs,
    Key,
    Leaf,
    ModelState,
    Outputs,
    Params,
    PyTree,
    Tree,
)
from dist_ens.members.modes import Apply
from dist_ens.sampling.hyper import Given

# What `init` and `apply` of a network are given, for messages.
INPUTS_RULE = 'batch["inputs"], or the whole batch if it is no dict with this key'
NETWORK, MEAN, STD = "network", "label_mean", "label_std"


def whole_parts(params: Params, model_state: ModelState | None) -> tuple[Params, ModelState]:
    """Returns parameters and model state as they are, `()` for none."""
    return params, () if model_state is None else model_state


def _unchanged(shared: PyTree) -> PyTree:
    return shared


@dataclasses.dataclass(frozen=True)
class Member:
    """One network, as two pure functions; `dist_ens.members` describes them.

    Attributes:
        init: Initialiser, `init(key, inputs) -> (params, model_state)`.
        apply: Forward pass, `apply(params, model_state, inputs, key, train) -> (outputs,
            model_state)`. `key` may be None if `train` is False.
        name: Name of the network's class or function, for messages.
        has_apply: Whether the network has a forward pass. If it is False, the network can be
            trained with a loss function, but cannot predict: `apply` raises a `UserError`.
        sample: Forward pass with a key and without dropout, with the arguments of `apply`. It
            predicts if a network cannot be called without a key. Default: `apply`.
        adapt_loss: Function that makes a loss of `params` and `model_state` from a loss that takes
            both as the network's library has them.
        heads: Number of heads of a network whose outputs are [heads, batch, ...]. Each is a
            predictor. None for a network whose outputs are [batch, ...].
        takes_given: Whether `init`, `apply` and `sample` also take, by name, `hyper`, the settings
            of the member, and `shared`, the arrays that all members share.
        base_of: Function that makes `shared` from what an ensemble is given, such as the pair of
            parameters and model state from a module of the library.
        parts_of: Function that splits a network of the library and its model state, or None, into
            `params` and `model_state`.

    >>> def init(key, inputs):
    ...     return {"w": jnp.ones(3)}, ()
    >>> def apply(params, model_state, inputs, key, train):
    ...     return inputs @ params["w"], model_state
    >>> member = Member(init, apply, name="linear")
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 3)))
    >>> member.apply(params, model_state, jnp.array([[1.0, 2.0, 3.0]]), None, False)[0]
    Array([6.], dtype=float32)
    """

    init: Callable[[Key, Inputs], tuple[Params, ModelState]]
    apply: Apply
    name: str = "a network"
    has_apply: bool = True
    sample: Apply | None = None
    heads: int | None = None
    takes_given: bool = False
    base_of: Callable[[PyTree], PyTree] = _unchanged
    adapt_loss: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] = lambda loss: loss
    parts_of: Callable[[Params, ModelState | None], tuple[Params, ModelState]] = whole_parts

    @property
    def has_base(self) -> bool:
        """Whether the member is one on a network that is shared, such as that of `lora`."""
        return self.base_of is not _unchanged

    def given(self, hyper: PyTree, shared: Shared) -> "Member":
        """Returns the network that is given the settings of a member, and what all share."""
        named = {"hyper": Given(hyper)} if hyper else {}
        if not shared.is_empty:
            named["shared"] = shared.arrays
        return self.with_named(named)

    def with_named(self, named: Mapping[str, PyTree]) -> "Member":
        """Returns the network with the arguments `hyper` and `shared`, those that it takes."""
        if not self.takes_given or not named:
            return self
        given = partial(partial, **named)
        return with_forward(self, given, init=given(self.init), takes_given=False)

    def evaluate(
        self, params: Params, model_state: ModelState, inputs: Inputs, key: Key
    ) -> tuple[Outputs, ModelState]:
        """Returns the outputs and the model state in evaluation, without dropout.

        The key is given only to a network that cannot be called without one, such as a variational
        autoencoder.
        """
        try:
            return self.apply(params, model_state, inputs, None, False)
        except UserError:
            raise
        except Exception as error:  # A network may raise anything without a key.
            try:
                return (self.sample or self.apply)(params, model_state, inputs, key, False)
            except Exception:  # The network did not lack a key.
                raise error from None


@contextlib.contextmanager
def explained_network(what: str, inputs: Inputs, advice: str) -> Iterator[None]:
    """Turns any error that a network raises for inputs into a `UserError` that says what to do."""
    try:
        yield
    except (UserError, RuntimeError):  # A device may be full, or an array deleted.
        raise
    except Exception as error:  # The network of a user may raise anything.
        told = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, jax.errors.TracerBoolConversionError):
            advice = (
                "Python decides here by a number that JAX traces, such as a setting of hyper that "
                "is the rate of linen's Dropout. Use jax.numpy.where, or "
                "dist_ens.models.dropout(x, rate, key)."
            )
        raise UserError(f"{what} {described(inputs)}: {told} {advice}") from error


def require_parameters(params: Params) -> None:
    """Raises a `UserError` unless every leaf of `params` is a floating-point array."""
    if not jax.tree.leaves(params):
        raise UserError("The network has no parameters: its init returned no arrays.")
    require_arrays(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UserError(
                f"Parameter {leaf_name(path)} has the type {jnp.result_type(leaf)}, which has no "
                "gradient. Keep arrays that are not floating-point in the model state."
            )


def with_normalized_inputs(member: Member, mean: PyTree, std: PyTree) -> Member:
    """Returns a member whose network is given `(inputs - mean) / std`, computed in float32.

    If `inputs` are a pytree, `mean` and `std` have its structure, with numbers for each leaf. A
    leaf with mean 0 and standard deviation 1 keeps its type.

    Args:
        member: Network of normalized inputs.
        mean: Mean of the inputs: a number, or one number for each entry of the inputs' last axis.
        std: Standard deviation of the inputs, positive, with the same structure and lengths as
            `mean`.

    >>> from dist_ens.members import as_member
    >>> member = as_member(
    ...     init=lambda key: {"w": jnp.ones(())},
    ...     apply=lambda params, inputs: inputs * params["w"],
    ... )
    >>> normalized = with_normalized_inputs(member, mean=2.0, std=4.0)
    >>> normalized.apply({"w": jnp.ones(())}, (), jnp.array([2.0, 10.0]), None, False)[0]
    Array([0., 2.], dtype=float32)
    """

    def is_identity(mean: PyTree, std: PyTree) -> bool:
        means, stds = map(jax.tree.leaves, (mean, std))
        return not any(map(np.any, means)) and all(np.all(np.equal(each, 1)) for each in stds)

    if is_identity(mean, std):
        return member

    def normalized_leaf(leaf: jax.Array, mean: PyTree, std: PyTree) -> jax.Array:
        if is_identity(mean, std):
            return leaf
        last_axis = (1,) * (leaf.ndim - 1) + (-1,)
        shift, scale = (np.reshape(np.asarray(v, np.float32), last_axis) for v in (mean, std))
        if {shift.size, scale.size} - {1, *leaf.shape[1:][-1:]}:
            raise UserError(
                f"There are {shift.size} means and {scale.size} deviations for inputs of the shape "
                f"{list(leaf.shape[1:])}. Give one of each, or one per entry of the last axis."
            )
        return (leaf.astype(jnp.float32) - shift) / scale

    def normalized(inputs: Inputs) -> Inputs:
        return jax.tree.map(normalized_leaf, inputs, mean, std)

    return with_forward(
        member,
        lambda apply: (
            lambda params, model_state, inputs, key, train, **given: apply(
                params, model_state, normalized(inputs), key, train, **given
            )
        ),
        init=lambda key, inputs, **given: member.init(key, normalized(inputs), **given),
    )


def with_compute_dtype(member: Member, dtype: str) -> Member:
    """Returns a member that computes in another floating-point type, such as `bfloat16`.

    Parameters, shared arrays and floating-point inputs are converted before the call. Afterwards,
    floating-point outputs are converted to float32, and the model state to its own types. So
    parameters, gradients and statistics keep their types.
    """
    if dtype == "float32":
        return member

    def in_dtype(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            if "shared" in given:
                given["shared"] = floats_as(given["shared"], dtype)
            outputs, new_state = apply(
                floats_as(params, dtype), model_state, floats_as(inputs, dtype), key, train, **given
            )
            new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
            return floats_as(outputs, "float32"), new_state

        return forward

    return with_forward(member, in_dtype)


def with_forward(member: Member, change: Callable[[Apply], Apply], **others: PyTree) -> Member:
    """Returns a member with changed forward passes, and other attributes."""
    sample = None if member.sample is None else change(member.sample)
    return dataclasses.replace(member, apply=change(member.apply), sample=sample, **others)


def floats_as(tree: Tree, dtype: str) -> Tree:
    """Returns a pytree of arrays with its floating-point leaves in another type."""

    def converted(leaf: Leaf) -> Leaf:
        # A module of equinox also has leaves that are not arrays, such as functions.
        is_float = jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(converted, tree)


def rematerialized(member: Member) -> Member:
    """Returns a member that stores only matrix products and convolutions for the backward pass."""
    kept = (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)
    return with_forward(
        member,
        partial(
            jax.checkpoint, policy=lambda primitive, *_, **__: primitive in kept, static_argnums=4
        ),
    )


def with_label_scale(member: Member, shape: tuple[int, ...]) -> Member:
    """Returns a member whose model state also holds the labels' scale, first mean 0 and std 1.

    `shape` is () or (targets,).
    """

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        params, model_state = member.init(key, inputs, **given)
        return params, {NETWORK: model_state, MEAN: jnp.zeros(shape), STD: jnp.ones(shape)}

    def beside_scale(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            outputs, of_network = apply(params, model_state[NETWORK], inputs, key, train, **given)
            return outputs, {**model_state, NETWORK: of_network}

        return forward

    def parts_of(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
        params, of_network = member.parts_of(params, model_state[NETWORK])
        return params, {**model_state, NETWORK: of_network}

    return with_forward(member, beside_scale, init=init, parts_of=parts_of)


def standardized(labels: jax.Array, model_state: ModelState) -> jax.Array:
    """Returns labels minus their mean, divided by their standard deviation, float[...]."""
    mean, std = (jnp.broadcast_to(model_state[name], labels.shape) for name in (MEAN, STD))
    return (labels - mean) / std


def has_label_scale(model_state: ModelState) -> bool:
    """Returns whether a model state holds a scale of labels; see `with_label_scale`."""
    return isinstance(model_state, dict) and model_state.keys() == {NETWORK, MEAN, STD}


def member_label_scale(state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the labels' mean and std on the devices, float32[] or float32[targets]."""
    return state.model_state[MEAN][0], state.model_state[STD][0]
