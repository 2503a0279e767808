"""The assessment of a finished run: the questions that it is asked, and its answers."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from dist_ens.callbacks.summary import scores_to_dict
from dist_ens.data import Source
from dist_ens.evaluation import Evaluation, Evaluator, Scores, curves_of, pictures_of
from dist_ens.evaluation.ood import Unlabelled, detection, histograms
from dist_ens.evaluation.out_of_bag import examples_out_of_bag, held_out_scores
from dist_ens.evaluation.scoring import without_failed
from dist_ens.experiment.named import open_test
from dist_ens.experiment.record import Run
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import BrokenMembersError, UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.layout import to_host
from dist_ens.metrics.catalogue import UNDER_SHIFT, headlines, label_of

CALIBRATIONS = ("temperature", "vector", "isotonic", "variance")
CONFORMAL = ("lac", "aps", "raps", "cqr", "cv+", "jackknife+")
_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of an assessment; those of `dist-ens evaluate` describe them."""

    ood: str | None = None
    shift: bool = False
    calibration: str | None = None
    conformal: str | None = None
    level: float = 0.9
    out_of_bag: bool = False
    leave_out_broken: bool = False

    @property
    def asks_more(self) -> bool:
        """Whether anything is asked beside the scores of the test split."""
        return bool(self.ood or self.shift or self.calibration or self.conformal or self.out_of_bag)

    @property
    def needs_own_members(self) -> bool:
        """Whether the examples must be known that each member left out of its training."""
        return self.out_of_bag or self.conformal in ("cv+", "jackknife+")


@dataclasses.dataclass(frozen=True)
class Assessment:
    """The results of an assessment.

    `extras` are by their names in the JSON file, `broken` are ids, and the run keeps `answers` by
    question, such as `calibration=temperature`.
    """

    scores: Scores
    extras: JsonDict
    curves: JsonDict
    pictures: Sequence[np.ndarray]
    broken: Sequence[int] = ()
    answers: JsonDict = dataclasses.field(default_factory=dict)

    def scores_to_dict(self) -> JsonDict:
        """Returns the scores of the test split as plain data that JSON can hold."""
        return {**scores_to_dict(self.scores), "broken_members": list(self.broken)}

    def to_dict(self) -> JsonDict:
        """Returns the scores and the results of the options as plain data that JSON can hold."""
        return {**self.scores_to_dict(), **self.extras}

    def sentences(self) -> list[str]:
        """Returns the results as sentences, without the scores."""
        extras, told = self.extras, []
        if self.broken:
            told.append(
                told_of_broken(
                    self.broken,
                    left_out={*self.broken} <= {*self.scores.left_out},
                    num_members=len(self.scores.members),
                    num_groups=len(self.scores.groups),
                )
            )
        if self.scores.intervals is None:
            told.append("The test split has too many rows to be resampled: there are no intervals.")
        if "ood" in extras:
            listed = ", ".join(
                f"{name} {measures['auroc']:.4f}"
                for name, measures in extras["ood"]["ensemble"].items()
            )
            told.append(f"AUROC of the ensemble, out against in distribution: {listed}.")
        told += _of_shifts(extras.get("shift", {}))
        if "calibrated" in extras:
            after, before = extras["calibrated"], self.scores.ensemble
            told += [
                f"After {after['method']} calibration the ensemble's {metric.label} is "
                f"{after['test'][metric.name]:.4f} ({before[metric.name]:.4f} before)."
                for metric in headlines(after["test"])
                if metric.unit == "nats"
            ]
            told += after["warnings"]
        if "conformal" in extras:
            found = extras["conformal"]
            size = (
                f"sets of {found['mean_set_size']:.3g} classes"
                if "mean_set_size" in found
                else f"intervals of width {found['mean_width']:.4g}"
            )
            told.append(
                f"Conformal {found['method']} at {found['level']:g}: {size} on average, which hold "
                f"{found['coverage']:.4f} of the test split."
            )
        if "out_of_bag" in extras:
            found = extras["out_of_bag"]
            scored = ", ".join(
                f"{metric.name} {found['scores'][metric.name]:.4f}"
                for metric in headlines(found["scores"])[:2]
            )
            told.append(
                f"Training examples scored by members that left them out: {scored} "
                f"({found['not_scored']:,} examples no member left out)."
            )
        return told


def _of_shifts(shifts: Mapping[str, Sequence[JsonDict]]) -> list[str]:
    """Returns a sentence about the scores under each shift."""
    told = []
    for shift, strengths in shifts.items():
        for metric in headlines(strengths[0]["test"])[:1]:
            listed = ", ".join(
                f"{at['test'][metric.name]:.4f} at {at['strength']:g}" for at in strengths
            )
            told.append(f"Under {label_of(shift)} the ensemble's {metric.name} is {listed}.")
    return told


def told_of_broken(
    broken: Sequence[int], *, left_out: bool, num_members: int, num_groups: int = 1
) -> str:
    """Returns a sentence about members that predict NaN, and what to do."""
    told = f"Members {list(broken)} predict NaN"
    if left_out:
        return f"{told}; they were left out of the ensemble."
    train_again = "Train again with a lower --config.optimizer.learning_rate."
    if len(broken) == num_members:
        return f"{told}: that is all of them. {train_again}"
    if num_groups > 1:
        return f"{told}, so the ensemble of their group does too. {train_again}"
    return f"{told}, so the ensemble does too. Pass --leave_out_broken to average the others."


def assess(
    run: Run,
    evaluator: Evaluator,
    state: State,
    source: Source,
    questions: EvaluationRequest,
    evaluation: Evaluation | None = None,
) -> Assessment:
    """Scores a run on its test split, and computes the results of the options."""
    run.require_trained_on(source)
    evaluator = without_failed(evaluator, state)
    found, broken = without_broken(
        evaluator,
        state,
        lambda each: _answers(
            run, each, state, source, questions, evaluation if each is evaluator else None
        ),
        leave_out=questions.leave_out_broken,
    )
    return dataclasses.replace(found, broken=sorted({*found.broken, *broken}))


def without_broken(
    evaluator: Evaluator, state: State, ask: Callable[[Evaluator], _Answer], *, leave_out: bool
) -> tuple[_Answer, list[int]]:
    """Returns the result of `ask`, and the ids of members that predict NaN and were left out."""
    broken: list[int] = []
    while True:
        try:
            return ask(evaluator), broken
        except BrokenMembersError as error:
            if not leave_out:
                raise
            # The function is called again, so that the whole result is of the same members.
            broken = sorted({*broken, *error.member_ids})
            ids = evaluator.ensemble.predictor_ids(state)
            positions = np.flatnonzero(np.isin(ids, broken))
            evaluator = evaluator.without(positions.tolist())


def _answers(
    run: Run,
    evaluator: Evaluator,
    state: State,
    source: Source,
    questions: EvaluationRequest,
    evaluation: Evaluation | None,
) -> Assessment:
    """Returns the results of `assess` for an evaluator, which may leave some members out."""
    if evaluation is None:
        evaluation = evaluator.evaluate(state, source.test, by_size=True)
    if questions.leave_out_broken:
        evaluation.require_sound()
    curves, scores = curves_of(evaluation), evaluation.scores(intervals=True)
    before: JsonDict = {"test": scores.ensemble}
    if scores.intervals is not None:
        before["test_interval"] = scores.intervals["ensemble"]
    if "reliability" in curves:
        before["reliability"] = curves["reliability"]["ensemble"]
    extras: JsonDict = {}
    answers: JsonDict = {}
    if (ood := questions.ood) is not None:
        outside = evaluator.evaluate(state, _other_kind(run, ood))
        extras |= detection(evaluation, outside)
        curve = {"name": pathlib.PurePath(ood).name, **histograms(evaluation, outside)}
        answers[f"ood={ood}"] = {"curve": curve, "scores": extras["ood"]["ensemble"]}
    if questions.shift:
        extras["shift"] = _under_shift(evaluator, state, source, run)
        answers["shift"] = {"curve": _over_strength(extras["shift"])}
    for name, question, answer in _calibrations(run, evaluator, state, source, questions):
        made = answer.pop("calibration")
        extras[name] = answer
        answers[question] = {"scores": answer, "before": before, "calibration": made}
    if questions.out_of_bag:
        out_of_bag = out_of_bag_of(run, evaluator, state)
        extras["out_of_bag"] = held_out_scores(evaluator, state, source.train, out_of_bag)
        answers["out_of_bag"] = {**extras["out_of_bag"], "before": before}
    pictures = pictures_of(evaluation, source.test, curves)
    return Assessment(scores, extras, curves, pictures, evaluation.broken_members, answers)


def _calibrations(
    run: Run, evaluator: Evaluator, state: State, source: Source, questions: EvaluationRequest
) -> Iterator[tuple[str, str, JsonDict]]:
    """Fits calibrations."""
    if questions.calibration is None and questions.conformal is None:
        return
    # These import scipy.optimize, which takes half a second.
    from dist_ens.evaluation.calibration import Calibration
    from dist_ens.evaluation.conformal import LEFT_OUT_BY
    from dist_ens.evaluation.fit_calibration import (
        calibrated_scores,
        conformal_scores,
        fit_map,
        fit_rule,
        predictor_of,
    )

    test = source.test
    if (method := questions.calibration) is not None:
        made = fit_map(method, evaluator, state, source.valid)
        scores = calibrated_scores(made, evaluator, state, test)
        yield "calibrated", f"calibration={method}", {**scores, "calibration": made.to_dict()}
    if (method := questions.conformal) is not None:
        level, out_of_bag = questions.level, None
        trained_on = LEFT_OUT_BY.get(method)
        split = source.train if trained_on else source.valid
        if trained_on == run.experiment.data.examples:
            out_of_bag = out_of_bag_of(run, evaluator, state)
        rule = fit_rule(method, level, evaluator, state, split, out_of_bag)
        scores = conformal_scores(rule, level, evaluator, state, test)
        predictor = predictor_of(evaluator, state)
        made = Calibration(predictor=predictor, conformal=rule, level=level)
        question = f"conformal={method} level={level:g}"
        yield "conformal", question, {**scores, "calibration": made.to_dict()}


def _over_strength(shifts: Mapping[str, Sequence[JsonDict]]) -> JsonDict:
    """Returns the scores under each shift as curves over its strength."""
    return {
        name: {
            "strength": [at["strength"] for at in strengths],
            **{
                metric.name: [at["test"][metric.name] for at in strengths]
                for metric in UNDER_SHIFT
                if metric.name in strengths[0]["test"]
            },
        }
        for name, strengths in shifts.items()
    }


def out_of_bag_of(run: Run, evaluator: Evaluator, state: State) -> np.ndarray:
    """Returns a mask of the examples that each member left out; bool[members, examples]."""
    data, pooling = run.experiment.data, evaluator.distribution.pooling
    if data.examples not in ("bootstrap", "kfold") or run.spec.num_groups > 1:
        raise UserError(
            f"No member leaves out an example with data.examples={data.examples!r}. Train with "
            "--config.data.examples=bootstrap or kfold."
        )
    if data.examples == "bootstrap" and jax.tree.leaves(state.model_state):
        raise UserError("Batch statistics know what a bootstrap sample leaves out. Use kfold.")
    if pooling != "probs":
        raise UserError(f"Out-of-bag predictions are not pooled as {pooling}: use --pooling=probs.")
    out_of_bag = examples_out_of_bag(
        to_host(state.member_id),
        run.num_train_examples,
        seed=run.experiment.seed,
        num_folds=data.num_folds,
    )
    out_of_bag = np.repeat(out_of_bag, evaluator.ensemble.heads or 1, axis=0)
    out_of_bag[list(evaluator.left_out)] = False
    return out_of_bag


def _other_kind(run: Run, name: str) -> Unlabelled:
    """Returns the test split of a source, by its name, as out-of-distribution examples."""
    spec, where = run.spec, f"--ood={quoted(name)}"
    if spec.standardization or spec.label_shape or spec.num_groups > 1:
        raise UserError(
            f"{where} cannot be compared with {spec}: tables, texts and groups of members have "
            "units or tests of their own. Leave --ood out."
        )
    config = dataclasses.replace(run.experiment.data, source=name, num_classes=None, validation=0.0)
    other = Unlabelled(open_test(config), spec, where)
    other.take(np.zeros(1, np.int64))  # A wrong shape raises an error before anything is computed.
    return other


def _under_shift(
    evaluator: Evaluator, state: State, source: Source, run: Run
) -> dict[str, list[JsonDict]]:
    """Returns the scores under each shift, in the order of its strengths."""
    # It imports scipy.ndimage, which few runs need.
    from dist_ens.evaluation.shift import shifted_splits

    found: dict[str, list[JsonDict]] = {}
    for name, splits in shifted_splits(source.test, run.spec).items():
        found[name] = []
        for split in splits:
            scores = evaluator.evaluate(state, split).require_sound().scores(intervals=True)
            found[name].append(
                {
                    "strength": float(split.strength),
                    **scores.to_dict(),
                    "mean_member": scores.mean_member,
                }
            )
    return found
