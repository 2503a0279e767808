"""An ensemble as one function that `jax.export` stores: networks, members, pool and calibration.

The program has no `shard_map`, which fails on TPUs in an exported file. Members without
convolutions are one `vmap`. Convolutional members are taken one after another: on a CPU, 8 LeNets
took 0.41 s for 1,000 images one after another, 0.49 s unrolled, and 0.86 s in one `vmap`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dist_ens.data import Spec
from dist_ens.data.columns import TableRule
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.batches import rows_of
from dist_ens.ensemble.initial_state import shapes_of
from dist_ens.ensemble.padding import explained_inputs
from dist_ens.execution.heuristics import ONE_BY_ONE
from dist_ens.execution.lowerings import CONVOLUTION
from dist_ens.execution.rewrite import contains
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.extras import imported
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State, described
from dist_ens.ground.types import Inputs, Leaf, Outputs, PyTree, Shapes
from dist_ens.layout import to_host
from dist_ens.losses import Prediction

if TYPE_CHECKING:
    from dist_ens.evaluation.calibration import Calibration

PLATFORMS = ("cpu", "cuda", "tpu")
_KNOWN_PLATFORMS = (*PLATFORMS, "rocm")


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported ensemble.

    Attributes:
        content: Bytes of the file, which `jax.export.deserialize` reads.
        description: Description of the inputs, the outputs and the members, as JSON values.
    """

    content: bytes = dataclasses.field(repr=False)
    description: JsonDict


def exported(
    ensemble: Ensemble,
    state: State,
    inputs: Shapes,
    *,
    platforms: Sequence[str] = PLATFORMS,
    weights: ArrayLike | None = None,
    calibration: "Calibration | None" = None,
    members: bool = False,
    spec: Spec | None = None,
) -> Exported:
    """Returns the pooled prediction of an ensemble as a function that needs `jax` alone.

    Args:
        ensemble: Ensemble with one group of members.
        state: State of the ensemble or of some members.
        inputs: Inputs, or their shapes and types, leaves [batch, ...]. The exported function takes
            any batch size of at least 1.
        platforms: Platforms of JAX on which the function will run.
        weights: Weights of the members in the pool, float[members]; see `Ensemble.predict`.
        calibration: Calibration of the same state and weights. Default: none.
        members: Whether the outputs include the predictions of the members.
        spec: Description of the data. If it standardises inputs and targets, those of the function
            are in the units of the data. Default: inputs are those of the network.

    Raises:
        UserError: If the function cannot be exported.

    >>> import optax
    >>> from dist_ens import losses
    >>> network = (
    ...     lambda key: {"w": jnp.ones((3, 2))},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), losses.categorical(2), num_members=4)
    >>> x = np.ones((1, 3), np.float32)
    >>> found = exported(ensemble, ensemble.init({"inputs": x}), x)
    >>> prediction = jax.export.deserialize(bytearray(found.content)).call(np.ones((5, 3), "f"))
    >>> prediction["mean"].shape, [*prediction]
    ((5, 2), ['aleatoric', 'epistemic', 'mean', 'total'])
    """
    from dist_ens.evaluation.calibration import Predictor, objective_of  # It imports scipy, slowly.

    imported("flatbuffers", "export")
    platforms = (platforms,) if isinstance(platforms, str) else platforms
    if not platforms or {*platforms} - {*_KNOWN_PLATFORMS}:  # JAX would export for any name.
        raise UserError(
            f"platforms are {', '.join(platforms) or 'none'}. Give one or more of "
            f"{', '.join(_KNOWN_PLATFORMS)}."
        )
    if ensemble.num_groups > 1:
        raise UserError(
            f"The {ensemble.num_groups} groups of members were trained on other examples each, and "
            "are not pooled. Export a run on one split of the data."
        )
    if rows_of(inputs) is None:
        raise UserError(f"The inputs are {described(inputs)}. Give leaves [batch, ...].")
    here, state = ensemble.at(state)
    weights = here.programs.checked_weights(weights)
    if calibration is not None:
        calibration.require_of(Predictor.of(here, state, weights=weights))
    ids, class_names = here.predictor_ids(state).tolist(), [*state.class_names] or None
    state, shared = jax.tree.map(_constant, (here.programs.needed(state), here.shared))
    prepare = _preparation(spec)
    outputs = _outputs_of(here, state, shared, jax.eval_shape(prepare, _with_size(inputs, 1)))
    scale = spec.standardization if spec is not None else None

    def predict(inputs: Inputs) -> Prediction:
        prediction = here.programs.pooled(outputs(prepare(inputs)), state, weights)
        if scale is not None:
            prediction = prediction.in_unit(
                np.array(scale.target_mean[0]), np.array(scale.target_std[0])
            )
        if calibration is not None:
            distribution = objective_of(here).distribution
            with jax.default_matmul_precision("highest"):
                prediction = calibration.of_prediction(distribution, prediction, inputs)
        return prediction

    hidden = {"unit", "class_names", *(() if members else ("members", "member_variance"))}

    def by_name(inputs: Inputs) -> dict[str, PyTree]:
        values = vars(predict(inputs)).items()
        return {name: value for name, value in values if name not in hidden and value is not None}

    shapes = _with_size(inputs, _any_size())
    try:
        found = jax.export.export(jax.jit(by_name), platforms=platforms)(shapes)
        content = found.serialize()
    except Exception as error:  # JAX raises many kinds, for operations and sizes that do not fit.
        raise UserError(
            f"jax.export cannot export this ensemble: {type(error).__name__}: {first_line(error)} "
            "Choose fewer platforms, or change the network, such as len(x) to x.shape[0]."
        ) from error
    description: JsonDict = {
        "inputs": _described({"inputs": shapes}),
        "outputs": _described(jax.tree.unflatten(found.out_tree, found.out_avals)),
        "unit": jax.eval_shape(predict, shapes).unit,
        "class_names": class_names,
        "member_ids": ids,
        "weights": None if weights is None else weights.tolist(),
        "calibration": None if calibration is None else calibration.method,
        "conformal": None,
        "platforms": [*found.platforms],
        "jax": jax.__version__,
    }
    if spec is not None and spec.table is not None:
        description["columns"] = [
            {"name": each.name, "categories": each.categories} for each in spec.table.columns
        ]
    if calibration is not None and calibration.conformal is not None:
        method = calibration.conformal.method
        description["conformal"] = {"method": method, "level": calibration.level}
    return Exported(bytes(content), description)


def _preparation(spec: Spec | None) -> Callable[[Inputs], Inputs]:
    """Returns the function from inputs in the units of the data to inputs of the network."""
    if spec is not None and spec.table is not None:
        return partial(_encoded, spec.table)
    given = None if spec is None else spec.standardization
    if given is None or not given.has_inputs:
        return lambda inputs: inputs
    mean, std = (np.array(rows) for rows in (given.input_mean, given.input_std))
    return lambda inputs: _standardized(inputs, mean, std)


def _standardized(inputs: jax.Array, mean: np.ndarray, std: np.ndarray) -> jax.Array:
    """Returns `(inputs - mean) / std`, given moments in float64."""
    high = mean.astype(np.float32)
    low = (mean - high).astype(np.float32)
    # A mean may be far larger than its deviation, and float32 holds it in two parts. Without the
    # barrier, the compiler would add them.
    return (jax.lax.optimization_barrier(inputs - high) - low) / std.astype(np.float32)


def _encoded(rule: TableRule, numbers: jax.Array) -> jax.Array:
    """Returns what `TableRule.encode` returns, float32[rows, inputs], of `TableRule.numbers`."""
    found = []
    for column, values in zip(rule.columns, numbers.T, strict=True):
        if column.is_embedded:
            found.append(values[:, None])
        elif column.categories is not None:
            found.append(jax.nn.one_hot(values.astype(jnp.int32), len(column.categories)))
        else:
            is_missing = jnp.isnan(values)
            filled = jnp.where(is_missing, np.float32(column.median), values)
            inputs = [_standardized(filled, np.array(column.mean), np.array(column.std))]
            inputs += [is_missing.astype(jnp.float32)] if column.has_missing else []
            found.append(jnp.stack(inputs, axis=1))
    return jnp.concatenate(found, axis=1)


def _outputs_of(
    ensemble: Ensemble, state: State, shared: Shared, shapes: Shapes
) -> Callable[[Inputs], Outputs]:
    """Returns the outputs of all members for inputs of any batch size, given the shapes of one."""
    outputs = partial(ensemble.programs.outputs_without_mesh, state, shared=shared)
    with explained_inputs(shapes):
        traced = jax.make_jaxpr(partial(outputs, execution=ONE_BY_ONE))(shapes)
    members = "map" if contains(traced, CONVOLUTION) else "vmap"
    at_once = partial(outputs, execution=Execution(members=members))

    def of_row(row: Inputs) -> Outputs:
        alone = at_once(jax.tree.map(lambda leaf: leaf[None], row))
        return jax.tree.map(lambda leaf: leaf[:, 0], alone)

    try:
        jax.eval_shape(at_once, _with_size(shapes, _any_size()))
    except Exception:  # The network needs a number, such as `len(inputs)`.
        if ensemble.dropout_samples is None:  # Else all rows would have the noise of the first.
            return jax.vmap(of_row, out_axes=1)
    return at_once


def _constant(leaf: Leaf) -> Leaf:
    """Returns an array of the state without its layout, which the program would have too."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return to_host(leaf)
    words = to_host(jax.random.key_data(leaf))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))


def _any_size() -> Leaf:
    """Returns a symbol for the batch size."""
    return jax.export.symbolic_shape("batch")[0]


def _with_size(tree: Shapes, size: Leaf) -> Shapes:
    """Returns shapes and types of another batch size, a number or a symbol."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), shapes_of(tree)
    )


def _described(tree: PyTree) -> JsonDict:
    """Returns shape and type of each leaf by its name, such as `mean` or `interval.0`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): {
            "shape": [size if isinstance(size, int) else str(size) for size in leaf.shape],
            "dtype": leaf.dtype.name,
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
