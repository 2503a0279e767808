"""A finished run, asked how far it can be trusted: everything that `evaluate` says of one."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dist_ens.commands import quoted
from dist_ens.data import Source, open_test
from dist_ens.errors import BrokenMembersError, UserError
from dist_ens.evaluation import Evaluation, Evaluator, Scores, curves_of, pictures_of
from dist_ens.evaluation.ood import Unlabelled, detection, histograms
from dist_ens.evaluation.out_of_bag import examples_out_of_bag, held_out_scores
from dist_ens.experiment.checks import require_trained_on
from dist_ens.experiment.record import Run
from dist_ens.layout import to_host
from dist_ens.metrics.catalogue import UNDER_SHIFT, headlines, label_of
from dist_ens.state import State

_Answer = TypeVar("_Answer")

CALIBRATIONS = ("temperature", "vector", "isotonic", "variance")
CONFORMAL = ("lac", "aps", "raps", "cqr", "cv+", "jackknife+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is asked of a run beside its scores.

    Attributes:
        ood: Source of examples that are of another kind; None: not asked.
        shift: Whether scores under shifts of the test split are.
        calibration: One of `CALIBRATIONS`; None: not asked.
        conformal: One of `CONFORMAL`; None: not asked.
        level: Coverage of conformal predictions, in (0, 1).
        out_of_bag: Whether training examples are scored by the members that left them out.
        leave_out_broken: Whether members that predict NaN are left out of the ensemble.
    """

    ood: str | None = None
    shift: bool = False
    calibration: str | None = None
    conformal: str | None = None
    level: float = 0.9
    out_of_bag: bool = False
    leave_out_broken: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise UserError(f"The level of coverage is {self.level}, outside (0, 1). Try 0.9.")


@dataclasses.dataclass(frozen=True)
class Assessment:
    """What a run answers.

    Attributes:
        scores: On the test split, with intervals.
        extras: By its name in the file what else was asked for.
        curves: What the report draws.
        pictures: Inputs of the examples that it shows, where they are pictures.
        broken: Ids of the members that predict NaN.
    """

    scores: Scores
    extras: dict[str, Any]
    curves: dict[str, Any]
    pictures: Sequence[np.ndarray]
    broken: Sequence[int] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "groups": len(self.scores.groups),
            **self.scores.to_dict(),
            "mean_member": self.scores.mean_member,
            "broken_members": list(self.broken),
            "left_out_members": list(self.scores.left_out),
            **self.extras,
        }

    def sentences(self) -> list[str]:
        """What was found, for people."""
        told = []
        if self.broken:
            told.append(
                told_of_broken(
                    self.broken,
                    left_out=bool(self.scores.left_out),
                    num_members=len(self.scores.members),
                    num_groups=len(self.scores.groups),
                )
            )
        if self.scores.intervals is None:
            told.append("The test split has too many rows to be resampled: there are no intervals.")
        if "ood" in self.extras:
            best = {
                name: measures["auroc"] for name, measures in self.extras["ood"]["ensemble"].items()
            }
            listed = ", ".join(f"{name} {auroc:.4f}" for name, auroc in best.items())
            told.append(f"AUROC of the ensemble, out against in distribution: {listed}.")
        for shift, strengths in self.extras.get("shift", {}).items():
            for metric in headlines(strengths[0]["test"])[:1]:
                listed = ", ".join(
                    f"{at['test'][metric.name]:.4f} at {at['strength']:g}" for at in strengths
                )
                told.append(f"Under {label_of(shift)} the ensemble's {metric.name} is {listed}.")
        if "calibrated" in self.extras:
            after, before = self.extras["calibrated"], self.scores.ensemble
            told += [
                f"After {after['method']} calibration the ensemble's {metric.label} is "
                f"{after['test'][metric.name]:.4f} ({before[metric.name]:.4f} before)."
                for metric in headlines(after["test"])
                if metric.unit == "nats"
            ]
            told += after["warnings"]
        if "conformal" in self.extras:
            found = self.extras["conformal"]
            size = (
                f"sets of {found['mean_set_size']:.3g} classes"
                if "mean_set_size" in found
                else f"intervals of width {found['mean_width']:.4g}"
            )
            told.append(
                f"Conformal {found['method']} at {found['level']:g}: {size} on average, which hold "
                f"{found['coverage']:.4f} of the test split."
            )
        if "out_of_bag" in self.extras:
            found = self.extras["out_of_bag"]
            scored = ", ".join(
                f"{metric.name} {found['scores'][metric.name]:.4f}"
                for metric in headlines(found["scores"])[:2]
            )
            told.append(
                f"Training examples scored by members that left them out: {scored} "
                f"({found['not_scored']:,} examples no member left out)."
            )
        return told


def assess(
    run: Run,
    evaluator: Evaluator,
    state: State,
    source: Source,
    questions: EvaluationRequest,
    evaluation: Evaluation | None = None,
) -> Assessment:
    """Scores a run on its test split, and answers what else is asked.

    Args:
        run: What the state belongs to.
        evaluator: Of the run; how it pools is how all is answered.
        state: Of the ensemble.
        source: The run's data.
        questions: What is asked.
        evaluation: Evaluation of the test split by the evaluator, `by_size`, if there is one
            already.

    Returns:
        The answers, on every host.

    Raises:
        BrokenMembersError: If a question beside the scores meets NaN of members that are not to be
            left out.
        UserError: If a question does not fit the run.
    """
    require_trained_on(run, source)
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
    """Returns what a function answers, without the members that predict NaN.

    Args:
        evaluator: Evaluator of the ensemble.
        state: State of the ensemble.
        ask: Function of an evaluator that returns the answer.
        leave_out: Whether members that predict NaN are left out.

    Returns:
        The answer, and the ids of the members that were left out.

    Raises:
        BrokenMembersError: If members predict NaN and are not to be left out.
    """
    broken: list[int] = []
    while True:
        try:
            return ask(evaluator), broken
        except BrokenMembersError as error:
            if not leave_out:
                raise
            # All is asked anew: an ensemble is of the same members wherever it is asked.
            broken = sorted({*broken, *error.member_ids})
            positions = np.flatnonzero(np.isin(to_host(state.member_id), broken))
            evaluator = evaluator.without(positions.tolist())


def _answers(
    run: Run,
    evaluator: Evaluator,
    state: State,
    source: Source,
    questions: EvaluationRequest,
    evaluation: Evaluation | None,
) -> Assessment:
    """What `assess` says, of an evaluator that may leave some members out."""
    spec = run.spec
    if evaluation is None:
        evaluation = evaluator.evaluate(state, source.test, by_size=True)
    if questions.leave_out_broken:
        evaluation.require_sound()
    curves = curves_of(evaluation)
    extras: dict[str, Any] = {}
    if questions.ood is not None:
        outside = evaluator.evaluate(state, _other_kind(run, questions.ood))
        extras |= detection(evaluation, outside)
        curves["ood"] = {
            "name": pathlib.PurePath(questions.ood).name,
            **histograms(evaluation, outside),
        }
    if questions.shift:
        extras["shift"] = _under_shift(evaluator, state, source, run)
        curves["shift"] = {
            name: {
                "strength": [at["strength"] for at in strengths],
                **{
                    metric.name: [at["test"][metric.name] for at in strengths]
                    for metric in UNDER_SHIFT
                    if metric.name in strengths[0]["test"]
                },
            }
            for name, strengths in extras["shift"].items()
        }
    if questions.calibration is not None:
        from dist_ens.evaluation.calibration import (
            recalibrated,  # scipy.optimize takes half a second
        )

        extras["calibrated"] = recalibrated(
            questions.calibration, evaluator, state, spec, source.valid, source.test
        )
    trained_on = {"cv+": "kfold", "jackknife+": "bootstrap"}.get(questions.conformal or "")
    by_them = trained_on == run.experiment.data.examples
    out_of_bag = None
    if questions.out_of_bag or by_them:
        out_of_bag = out_of_bag_of(run, evaluator, state)
        if questions.out_of_bag:
            extras["out_of_bag"] = held_out_scores(evaluator, state, source.train, out_of_bag)
    if questions.conformal is not None:
        from dist_ens.evaluation.calibration import conformal_scores

        splits = {"train": source.train, "valid": source.valid, "test": source.test}
        extras["conformal"] = conformal_scores(
            questions.conformal,
            questions.level,
            evaluator,
            state,
            spec,
            splits,
            out_of_bag if by_them else None,
        )
    return Assessment(
        evaluation.scores(intervals=True),
        extras,
        curves,
        pictures_of(evaluation, source.test, curves),
        evaluation.broken_members,
    )


def told_of_broken(
    broken: Sequence[int], *, left_out: bool, num_members: int, num_groups: int = 1
) -> str:
    """Returns a sentence on members that predict NaN.

    Args:
        broken: Ids of these members.
        left_out: Whether they were left out of the ensemble.
        num_members: Number of members of the run.
        num_groups: Number of groups of members.
    """
    told = f"Members {list(broken)} predict NaN"
    if left_out:
        return f"{told}; they were left out of the ensemble."
    train_again = "Train again with a lower --config.optimizer.learning_rate."
    if len(broken) == num_members:
        return f"{told}: that is all of them. {train_again}"
    if num_groups > 1:
        return f"{told}, so the ensemble of their group does too. {train_again}"
    return f"{told}, so the ensemble does too. Pass --leave_out_broken to average the others."


def out_of_bag_of(run: Run, evaluator: Evaluator, state: State) -> np.ndarray:
    """Returns which training examples each member was not trained on.

    Args:
        run: Record of the run.
        evaluator: Evaluator of the run. Members that it leaves out predict no example.
        state: State of the ensemble.

    Returns:
        bool[members, examples].

    Raises:
        UserError: If members were trained on all, have several groups, learned statistics of whole
            batches, or are not pooled as probabilities.
    """
    examples, pooling = run.experiment.data.examples, evaluator.distribution.pooling
    if examples not in ("bootstrap", "kfold"):
        raise UserError(
            f"No member leaves out an example with data.examples={examples!r}. Train with "
            "--config.data.examples=bootstrap or kfold."
        )
    if examples == "bootstrap" and jax.tree.leaves(state.model_state):
        raise UserError(
            "The network has batch statistics, and with data.examples='bootstrap' they include "
            "examples that a member leaves out. Train with --config.data.examples=kfold."
        )
    if pooling != "probs":
        raise UserError(
            f"Members are pooled as {pooling!r}, and out-of-bag predictions as 'probs'. Add "
            "--pooling=probs."
        )
    if run.spec.num_groups > 1:
        raise UserError(
            f"The run has {run.spec.num_groups} groups of members, and out-of-bag predictions are "
            "those of one group. Train on a table with one split: one row in its train_idx and "
            "test_idx."
        )
    out_of_bag = examples_out_of_bag(
        to_host(state.member_id),
        run.num_train_examples,
        seed=run.experiment.seed,
        num_folds=run.experiment.data.num_folds,
    )
    out_of_bag[list(evaluator.left_out)] = False
    return out_of_bag


def _other_kind(run: Run, name: str) -> Unlabelled:
    """Returns the test split of a source as examples of another kind.

    Raises:
        UserError: If the run's inputs have units or a vocabulary of their own, or the examples have
            another shape.
    """
    spec, where = run.spec, f"--ood={quoted(name)}"
    if spec.standardization or spec.label_shape:
        raise UserError(
            f"{where} cannot be compared with {spec}: a table's columns have units of their own, "
            "and a text's characters numbers of their own. Leave --ood out."
        )
    if spec.num_groups > 1:
        raise UserError(
            f"{where} was given for {spec.num_groups} groups of members, and out-of-distribution "
            "scores are those of one ensemble. Train on a source of one group."
        )
    config = dataclasses.replace(run.experiment.data, source=name, num_classes=None, validation=0.0)
    other = Unlabelled(open_test(config), spec, where)
    other.take(np.zeros(1, np.int64))  # its shape is told before anything is computed
    return other


def _under_shift(
    evaluator: Evaluator, state: State, source: Source, run: Run
) -> dict[str, list[dict[str, Any]]]:
    """Returns for each shift the scores that there are without one, strength by strength."""
    # scipy.ndimage, which few runs need
    from dist_ens.evaluation.shift import require_float_inputs, shifted_splits

    found: dict[str, list[dict[str, Any]]] = {}
    shifted = shifted_splits(source.test, run.spec)
    some = next(iter(shifted.values()))[0]
    if some.dtype.name != run.spec.input_dtype:
        require_float_inputs(evaluator, state, some)
    for name, splits in shifted.items():
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
