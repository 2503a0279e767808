"""Selection of the best few members of an ensemble on validation data, with their weights."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Source, Split
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.evaluation.calibration import objective_of
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import Examples, examples_of
from dist_ens.evaluation.scoring import evaluator_of, scorable
from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_one_of, whole_number
from dist_ens.ground.state import State, require_state, select_members
from dist_ens.ground.types import Data
from dist_ens.layout import to_host
from dist_ens.losses.distribution import Values, checked_weights, passed
from dist_ens.metrics import Rows
from dist_ens.metrics.metric import CLASSWISE, WHOLE_WEIGHTS
from dist_ens.metrics.pooling import mean_of_members

METHODS = ("greedy", "top", "stacking")
_MOST_CHOICES = 10_000
# Scores that differ by a smaller part are tied, because predictions are in float32.
_TIE = 1e-6
# Weights of stacking stay above the first, so that each has a slope, and are 0 below the second.
_LEAST_WEIGHT, _NO_WEIGHT = 1e-9, 1e-4


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """The best few members of an ensemble, and their weights in the pool.

    Attributes:
        member_ids: Ids of the chosen members, in the order of the state, each once. Of members with
            heads, those of all heads of members of which one was chosen.
        weights: Weight of each of them, above 0, with sum 1.
        path: Score of the pool on the given data after each choice, in the unit of the metric. The
            last one is that of the result. Stacking makes one choice.
        choices: Id of the member that was chosen at each step. A member may be chosen again.
        ensemble: Ensemble of the chosen members, for `fit` and `predict`.
        state: State of the chosen members, on the layout of `ensemble`.

    >>> chosen = Selection((3, 17), (0.75, 0.25), (0.5, 0.4), (3, 17), ensemble=None, state=None)
    >>> dict(zip(chosen.member_ids, chosen.weights))
    {3: 0.75, 17: 0.25}
    """

    member_ids: tuple[int | str, ...]
    weights: tuple[float, ...]
    path: tuple[float, ...]
    choices: tuple[int, ...]
    ensemble: Ensemble = dataclasses.field(repr=False)
    state: State = dataclasses.field(repr=False)


class Choice(NamedTuple):
    """A choice of members by their positions: weights float64[members], path and choices.

    `before` is the score of all members that can be chosen, with equal weights.
    """

    weights: np.ndarray
    path: Sequence[float]
    choices: Sequence[int]
    before: float


def select(
    ensemble: Ensemble,
    state: State,
    data: Data,
    *,
    size: int = 5,
    metric: str = "nll",
    method: str = "greedy",
    batch_size: int | None = None,
) -> Selection:
    """Chooses the best few members of an ensemble on data that was not trained on.

    The members predict once. Members that predict NaN or infinity, or are frozen, are not chosen,
    nor are those whose own score is infinite, unless all are.

    - "greedy" begins with the best member, and adds the member with which the pool scores best. The
      same member may be added again. Its weight is its number of times divided by `size`.
    - "top" takes the members with the best scores of their own, with equal weights.
    - "stacking" finds the weights of all members with which the pool scores best. This is a convex
      problem for the NLL of classes. Members with weights below 1e-4 are dropped, and `size` is not
      read.

    Among tied members the one at the lower position is chosen.

    Args:
        ensemble: Ensemble with an objective, and one group of members.
        state: State of the ensemble, or of some members.
        data: Held-out data: a dict of arrays with `inputs` and `labels`, an iterable of batches, or
            a source of `dist_ens.data` (its validation split).
        size: Number of choices, from 1 to 10,000. It may exceed the number of members.
        metric: Name of a metric of the objective, such as `nll`, `accuracy`, `rmse` or `crps`, of
            which "lower" or "higher" is better. Stacking needs one that is a mean over the
            examples, or the root of one, and changes smoothly with the weights.
        method: Method, "greedy", "top" or "stacking".
        batch_size: Number of examples at a time. Default: that of `dist_ens.evaluate`.

    Returns:
        The selection, whose `weights` are for `predict`, `evaluate` and `calibrate`.

    Raises:
        UserError: If the data or the metric does not fit, the source has no validation split, or no
            member can be chosen.

    >>> import optax
    >>> from dist_ens.losses import squared_error
    >>> network = (lambda key: {"w": np.zeros(())}, lambda params, x: x + params["w"])
    >>> ensemble = Ensemble(network, optax.sgd(0.1), squared_error(), num_members=4)
    >>> state = ensemble.state_of([{"w": np.float32(w)} for w in (9.0, -1.0, 2.0, 7.0)])
    >>> data = {"inputs": np.zeros((8, 1)), "labels": np.zeros(8)}
    >>> chosen = select(ensemble, state, data, size=3, metric="rmse")
    >>> chosen.member_ids, [round(w, 2) for w in chosen.weights]  # (-1 - 1 + 2) / 3 = 0
    ((1, 2), [0.67, 0.33])
    >>> chosen.choices, chosen.path
    ((1, 2, 1), (1.0, 0.5, 0.0))
    >>> ensemble.predict(chosen.state, data["inputs"], weights=chosen.weights).mean[0].tolist()
    0.0

    Source: Caruana et al. (2004), "Ensemble selection from libraries of models", for greedy;
    Wolpert (1992), "Stacked generalization".
    """
    if isinstance(data, Source):
        data = Examples(required_validation(data), data.spec)
    require_state(state)
    given = examples_of(data, state.class_names)
    objective_of(ensemble)
    here, placed = ensemble.at(state._replace(class_names=()))
    examples = scorable(here, given)
    evaluator, split = evaluator_of(here, placed, examples, (), batch_size)
    found = choose(evaluator, placed, split, size=size, metric=metric, method=method)
    # Members with a chosen head keep all of their heads, some of which have weight 0.
    members = np.unique(np.flatnonzero(found.weights) // (here.heads or 1)).tolist()
    positions, ids = here.predictors_of(members), here.predictor_ids(placed)
    of_chosen, chosen = here.at(select_members(placed, members))
    chosen_ids = to_host(chosen.member_id).tolist()
    if chosen_ids != of_chosen.ids.tolist():  # The state is of as many members with other ids.
        of_chosen = of_chosen.with_members(chosen_ids)
    return Selection(
        tuple(ids[positions].tolist()),
        tuple(found.weights[positions].tolist()),
        tuple(found.path),
        tuple(ids[list(found.choices)].tolist()),
        of_chosen,
        chosen._replace(class_names=state.class_names),
    )


def required_validation(source: Source) -> Split:
    """Returns the validation split of a source; raises a `UserError` if it has none."""
    if source.valid is None:
        raise UserError(
            "Members are chosen on validation data, and the run held none out. Train with "
            "--config.data.validation=0.1, or give other data to dist_ens.select."
        )
    return source.valid


def choose(
    evaluator: Evaluator, state: State, split: Split, *, size: int, metric: str, method: str
) -> Choice:
    """Chooses members by their scores on a split, with an evaluator; see `select`."""
    size = whole_number("size", size, least=1, most=_MOST_CHOICES)
    require_one_of("method", method, METHODS)
    pool = _Pool(evaluator, state, split, metric)
    if method == "stacking":
        return pool.stacked()
    if method == "top":
        own = {member: pool.score([member], [1]) for member in pool.candidates}
        order: list[int] = []
        while own and len(order) < size:
            order.append([*own][_first_best([*own.values()])])
            own.pop(order[-1])
        path = [pool.score(*_counted(order[:n])) for n in range(1, len(order) + 1)]
        return pool.choice(order, path)
    choices: list[int] = []
    path = []
    for _ in range(size):
        scores = [pool.score(*_counted([*choices, each])) for each in pool.candidates]
        best = _first_best(scores)
        choices.append(pool.candidates[best])
        path.append(scores[best])
    return pool.choice(choices, path)


class _Pool:
    """The predictions of the members that can be chosen, and the score of any pool of them.

    Scores are lower for better pools, and infinite if they would be NaN.
    """

    def __init__(self, evaluator: Evaluator, state: State, split: Split, metric: str) -> None:
        ensemble = evaluator.ensemble
        if ensemble.num_groups > 1:
            raise UserError(
                f"Members are chosen from one pool, and this ensemble has {ensemble.num_groups} "
                "groups that were trained on other examples. Select each group alone."
            )
        self._num_members = ensemble.num_predictors
        checked_weights(np.ones(self._num_members), self._num_members, evaluator.distribution)
        self._evaluator = evaluator
        values, labels, self._weights = evaluator.member_values(state, split)
        broken = [~(v < np.inf).reshape(len(v), -1).all(axis=1) for v in values.values()]
        never = {
            *np.flatnonzero(np.any(broken, axis=0)).tolist(),
            *ensemble.predictors_of(frozen_positions(state)),
        }
        self.candidates = [each for each in range(self._num_members) if each not in never]
        if not self.candidates:
            raise UserError(
                f"None of the {self._num_members} members can be chosen: each one predicts NaN or "
                "infinity, or is frozen. Train again with a lower learning rate."
            )
        self._values, self._labels = jax.tree.map(jnp.asarray, (values, labels))
        one = np.zeros(1, np.int32), np.ones(1, np.float32)
        rows, classwise = jax.eval_shape(self._statistics_of, self._values, self._labels, *one)
        directions = evaluator.directions(rows, classwise)
        require_one_of("metric", metric, [name for name, better in directions.items() if better])
        known = {*rows, CLASSWISE, WHOLE_WEIGHTS}
        self._metric = next(
            m for m in evaluator.metrics if m.name == metric and known.issuperset(m.statistics)
        )
        self._sign = -1 if directions[metric] == "higher" else 1
        self._statistics = jax.jit(self._needed_of)
        # Errors of members that diverged may be finite or not, as their squares may.
        finite = [each for each in self.candidates if math.isfinite(self.score([each], [1]))]
        self.candidates = finite or self.candidates

    def _statistics_of(
        self, values: Values, labels: jax.Array, positions: jax.Array, pool: jax.Array
    ) -> tuple[Values, jax.Array]:
        """Returns the statistics of each row of the pool of some members, and sums over classes."""
        distribution = self._evaluator.distribution
        members = jax.tree.map(lambda leaf: leaf[positions], values)
        pooled = distribution.pool(members, **passed(pool / pool.sum()))
        counts = jnp.ones(len(labels), bool)
        if self._weights is not None:
            counts = jnp.asarray(self._weights, jnp.float32).reshape(labels.shape)
        rows = self._evaluator.programs.statistics(pooled, labels)
        rows = {name: leaf.ravel() for name, leaf in rows.items()}
        return rows, distribution.classwise(pooled, labels, counts)

    def _needed_of(self, *args: Any) -> tuple[Values, jax.Array]:
        """Returns what the metric needs of `_statistics_of`, so that the rest is not computed."""
        rows, classwise = self._statistics_of(*args)
        needed = {*self._metric.statistics, "nll"}  # Metrics of order look whether the NLL is NaN.
        if self._metric.statistic is not None:  # It may have a statistic for each class.
            needed |= {name for name in rows if name.startswith(f"{self._metric.name}_")}
        classwise = classwise if CLASSWISE in needed else jnp.zeros(0)
        return {name: leaf for name, leaf in rows.items() if name in needed}, classwise

    def score(self, positions: list[int], weights: Sequence[float]) -> float:
        """Returns the score of the pool of some members."""
        # The arrays have few lengths, for each of which a program is compiled.
        missing = (1 << (len(positions) - 1).bit_length()) - len(positions)
        members = np.array([*positions, *positions[:1] * missing], np.int32)
        pool = np.array([*weights, *[0] * missing], np.float32)
        found = self._statistics(self._values, self._labels, members, pool)
        rows, classwise = jax.device_get(found)
        counts = self._weights
        if counts is not None:
            rows = {name: leaf[counts > 0] for name, leaf in rows.items()}
            counts = counts[counts > 0]
        targets = self._evaluator.distribution.num_targets or 1
        unit = self._evaluator.units[0]
        score = self._metric.score(Rows(rows, classwise, unit, counts, num_targets=targets))
        return math.inf if np.isnan(score) else self._sign * float(score)

    def choice(self, choices: Sequence[int], path: Sequence[float]) -> Choice:
        """Returns the choice of members that weigh as often as they were chosen."""
        weights = np.bincount(choices, minlength=self._num_members) / len(choices)
        return self._found(weights, path, choices)

    def stacked(self) -> Choice:
        """Returns the choice of the weights with which the mean of a statistic is lowest."""
        from scipy.optimize import minimize  # This import takes half a second.

        members, count = jnp.array(self.candidates, jnp.int32), len(self.candidates)
        row_weights = None if self._weights is None else jnp.asarray(self._weights, jnp.float32)
        name = self._metric.statistics[0]

        @jax.jit
        @jax.value_and_grad
        def mean(pool: jax.Array, values: Values, labels: jax.Array) -> jax.Array:
            rows, _ = self._statistics_of(values, labels, members, pool)
            return self._sign * mean_of_members(rows[name], row_weights)

        def with_slope(pool: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = mean(pool.astype(np.float32), self._values, self._labels)
            return float(value), np.asarray(slope, np.float64)

        pool = np.full(count, 1 / count)
        slope = with_slope(pool)[1]
        smooth = np.isfinite(slope).all() and (count == 1 or slope.any())
        # The targets of an example may have different units.
        in_units = self._metric.unit == "target" and self._evaluator.distribution.num_targets
        if len(self._metric.statistics) > 1 or in_units or not smooth:
            raise UserError(
                f"Stacking follows the slope of a mean over the examples, which the metric "
                f"{self._metric.name!r} has not. Use metric='nll', or method='greedy'."
            )
        if count > 1:
            pool = minimize(
                with_slope,
                pool,
                jac=True,
                method="SLSQP",
                bounds=[(_LEAST_WEIGHT, 1)] * count,
                constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
                options={"maxiter": 500, "ftol": 1e-9},
            ).x
        pool = np.where(pool > _NO_WEIGHT, pool, 0)
        weights = np.zeros(self._num_members)
        weights[self.candidates] = pool / pool.sum()
        chosen = np.flatnonzero(weights).tolist()
        return self._found(weights, [self.score(chosen, weights[chosen].tolist())], chosen)

    def _found(self, weights: np.ndarray, path: Sequence[float], choices: Sequence[int]) -> Choice:
        before = self.score(self.candidates, [1] * len(self.candidates))
        scores = [self._sign * score for score in (*path, before)]
        return Choice(weights, scores[:-1], choices, scores[-1])


def _counted(choices: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the members among choices, in ascending order, with their numbers of times."""
    counts = np.bincount(choices)
    members = np.flatnonzero(counts)
    return members.tolist(), counts[members].tolist()


def _first_best(scores: Sequence[float]) -> int:
    """Returns the first position of those whose scores are tied with the lowest."""
    return int(np.argmax(np.isclose(scores, min(scores), rtol=_TIE, atol=0)))
