"""Scores of an ensemble whose loss is a function: the loss and its auxiliary scalars of a set.

A loss may be anything, such as the root of a mean or a loss of pairs, and is computed on the whole
set as one batch. If the set does not fit in memory, only a `Ratio` can be summed over its batches.
"""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from dist_ens.data import Split
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import explained_errors, loss_outputs
from dist_ens.ensemble.initial_state import shapes_of
from dist_ens.ensemble.memory import compiled_if_small
from dist_ens.ensemble.optimizer import evaluation_params
from dist_ens.ensemble.programs import Completed
from dist_ens.ensemble.update_steps import results_in_waves
from dist_ens.evaluation.examples import WholeBatches
from dist_ens.evaluation.scores import Scores, scores_of_means
from dist_ens.execution.apply import lowered
from dist_ens.execution.lift import Lifted, sharded
from dist_ens.execution.rewrite import rewritten
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import PREDICT, pinned_generator
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Key, Metrics, ModelState, Params, PyTree, Shapes
from dist_ens.layout import MEMBERS, REPLICATED, Waves, device_bytes, put_everywhere, to_host
from dist_ens.losses import Ratio
from dist_ens.members.modes import switch_arguments
from dist_ens.methods import LossInfo
from dist_ens.metrics.catalogue import direction_of
from dist_ens.processes import progress
from dist_ens.processes.stop_signal import StopSignal
from dist_ens.sampling.hyper import Given

# The loss and the auxiliary scalars of each member by name, float32[members] or a `Ratio` of them.
_Values = Mapping[str, jax.Array | Ratio]


def loss_scores(ensemble: Ensemble, state: State, split: Split, batch_size: int) -> Scores:
    """Returns the loss and the auxiliary scalars of each member on a whole set.

    The scores of `WholeBatches` are means over the batches. Any other set is one batch, or parts of
    `batch_size` examples if it does not fit in memory.
    """
    waves, length = Waves(ensemble.layout, ensemble.waves), len(split) // ensemble.num_groups
    if waves.count == 1:
        program, batch_size = _programs_of(ensemble).for_set(state, split, batch_size)
    else:
        of_wave = waves.take(state, 0)
        program, batch_size = _programs_of(ensemble.of_wave).for_set(of_wave, split, batch_size)
        program = results_in_waves(waves, program, MEMBERS)
    if isinstance(split, WholeBatches):
        batches = iter(split.batches)
    else:
        firsts = range(0, length, batch_size)
        rows = (np.arange(first, min(first + batch_size, length)) for first in firsts)
        batches = (_examples(split, of_batch, ensemble.num_groups) for of_batch in rows)
    sums: PyTree = None
    num_batches = 0
    for batch in batches:
        num_batches += 1
        progress.made()
        if StopSignal.current is not None:
            StopSignal.current.stop_evaluation()
        values = to_host(program(state, put_everywhere(ensemble.layout, batch)))
        values = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), values)
        sums = values if sums is None else jax.tree.map(np.add, sums, values)
    return scores_of_means(
        to_host(state.member_id).tolist(),
        {n: _mean(v, num_batches) for n, v in sums.items()},
        to_host(state.hyper or {}),
    )


def loss_directions(
    ensemble: Ensemble, state: State, split: Split, batch_size: int
) -> dict[str, str | None]:
    """Returns the direction of each score by its name, after a check that a set can be scored."""
    programs = _programs_of(ensemble)
    values = programs.values(state, programs.shapes_of_set(split))
    if _without_ratio(values):
        programs.for_set(state, split, batch_size)
    return {name: direction_of(name) for name in values}


class _Programs:
    """The compiled evaluation of a loss function, of one member of a device after another."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._layout, self._num_groups = ensemble.layout, ensemble.num_groups
        self._whole: dict[object, Callable[..., _Values] | None] = {}
        layout, way = ensemble.layout, Execution(members="map")
        of_one, specs = _values_of_one(ensemble), (MEMBERS, REPLICATED, REPLICATED)
        self._shared = ensemble.shared
        self._of_batch: jax.stages.Wrapped = jax.jit(
            sharded(lowered(of_one, way, layout), layout, specs, MEMBERS, way)
        )
        self._of_rows: Lifted | None = None
        if layout.model_axis > 1:
            self._of_rows = Lifted(
                of_one, layout=layout, in_specs=specs, out_specs=MEMBERS, execution=way
            )

    def for_set(
        self, state: State, split: Split, batch_size: int
    ) -> tuple[Callable[[State, Batch], _Values], int]:
        """Returns the program for a set, and the number of examples that it takes at a time.

        The set is one batch unless its program would need more than half of the free memory of a
        device. The decision is kept, so every evaluation of the set uses the same program.
        """
        length = len(split) // self._num_groups
        if self._of_rows is not None:  # Members that share devices leave no room for a whole set.
            return Completed(self._of_rows, self._shared), batch_size
        if length <= batch_size or isinstance(split, WholeBatches):
            return Completed(self._of_batch, self._shared), batch_size
        shapes = self.shapes_of_set(split)
        leaves, structure = jax.tree.flatten((shapes_of(state), shapes))
        key = structure, tuple(leaves)
        if key not in self._whole:
            everywhere = self._layout.sharding(REPLICATED)
            placed = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), shapes)
            self._whole[key] = compiled_if_small(
                self._of_batch,
                self._layout,
                state,
                placed,
                self._shared,
                more_bytes=device_bytes(placed),
            )
        whole = self._whole[key]
        if whole is not None:
            return Completed(whole, self._shared), length
        others = _without_ratio(self.values(state, shapes))
        if others:
            raise UserError(
                f"The evaluation data has {len(split):,} examples, which need more than half of "
                "the free memory as one batch. Values that are no Ratio cannot be computed in "
                f"parts: {', '.join(others)}. Return batch_mean(values, weights, ratio=True) as "
                "the loss and in aux, or score fewer examples."
            )
        return Completed(self._of_batch, self._shared), batch_size

    def values(self, state: State, batch: Batch | Shapes) -> Shapes:
        """Returns the shapes and types of the values of a batch."""
        return jax.eval_shape(self._of_batch, state, batch, self._shared)

    def shapes_of_set(self, split: Split) -> Shapes:
        """Returns the shapes and types of a set as one batch, or of the first of its batches."""
        if isinstance(split, WholeBatches):
            return shapes_of(split.batches[0])
        axis, length = min(self._num_groups, 2) - 1, len(split) // self._num_groups
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (*leaf.shape[:axis], length, *leaf.shape[axis + 1 :]), leaf.dtype
            ),
            shapes_of(_examples(split, np.zeros(1, np.int64), self._num_groups)),
        )


def _programs_of(ensemble: Ensemble) -> _Programs:
    # They do not depend on the execution, so that the ensemble that `fit` makes has the same.
    kept = ensemble.on(ensemble.layout, "loop").programs.evaluation
    if "loss" not in kept:
        kept["loss"] = _Programs(ensemble)
    return kept["loss"]


def _values_of_one(ensemble: Ensemble) -> Callable[[State, Batch, Shared], Metrics]:
    """Returns the function of a member and a batch that computes the loss and its scalars."""
    loss, num_groups, given = ensemble.programs.bare_loss, ensemble.num_groups, ensemble.loss
    takes_train = callable(given) and switch_arguments(given, False, given=4)

    @pinned_generator()
    def of_one(state: State, batch: Batch, shared: Shared) -> Metrics:
        if num_groups > 1:
            batch = jax.tree.map(lambda leaf: leaf[state.member_id % num_groups], batch)

        def values(
            params: Params, model_state: ModelState, batch: Batch, key: Key
        ) -> tuple[Metrics, ModelState]:
            hyper = Given(state.hyper)
            info = LossInfo(
                key, state.key, state.member_id, None, None, train=False, hyper=hyper, shared=shared
            )
            with explained_errors():
                results = loss(params, model_state, batch, info)
                _, new_state, values = loss_outputs(results, model_state)
            return values, new_state

        params = evaluation_params(state.params, state.opt_state)
        args = params, state.model_state, batch, jax.random.fold_in(state.key, PREDICT)
        if not takes_train:
            _require_evaluation_mode(values, *args)
        return values(*args)[0]

    return of_one


def _require_evaluation_mode(values: Callable[..., PyTree], *args: PyTree) -> None:
    """Raises a `UserError` if a loss draws or changes the model state in evaluation."""
    jaxpr = jax.make_jaxpr(rewritten(values, {}))(*args).jaxpr
    params, model_state = (len(jax.tree.leaves(arg)) for arg in args[:2])
    num_values = len(jaxpr.outvars) - model_state
    given, returned = jaxpr.invars[params : params + model_state], jaxpr.outvars[num_values:]
    _, used = dce_jaxpr(jaxpr, [True] * num_values + [False] * model_state)
    found = ["draws from its key"] if used[-1] else []
    if any(a is not b for a, b in zip(given, returned, strict=True)):
        found.append("changes the model state")
    if found:
        raise UserError(
            f"The loss function {' and '.join(found)} in evaluation, as dropout and batch "
            "statistics do in training. Give it the argument train, which is False in evaluation, "
            "and pass it to the network: loss_fn(params, model_state, batch, key, train)."
        )


def _without_ratio(values: _Values) -> list[str]:
    """Returns the names, in quotes, of values that cannot be summed over the batches of a set."""
    return [repr(name) for name, value in values.items() if not isinstance(value, Ratio)]


def _examples(split: Split, rows: np.ndarray, num_groups: int) -> Batch:
    """Returns some rows of a split, with a leading axis [groups] for several groups."""
    if num_groups == 1:
        return split.take(rows)
    begins = np.arange(num_groups) * (len(split) // num_groups)
    return split.take(begins[:, None] + rows[None])


def _mean(sums: np.ndarray | Ratio, num_batches: int) -> np.ndarray:
    """Returns the mean of summed values, and 0 for a mean whose weights are all 0."""
    if not isinstance(sums, Ratio):
        return sums / num_batches
    total, weight = sums
    return np.divide(total, weight, out=np.zeros_like(total), where=weight != 0)
