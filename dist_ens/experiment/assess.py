"""The assessment of a finished run: its scores and the reliability of its uncertainty."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from dist_ens.data import Source
from dist_ens.evaluation import Evaluation, Evaluator, curves_of, pictures_of
from dist_ens.evaluation.ood import Unlabelled, detection, histograms
from dist_ens.evaluation.out_of_bag import examples_out_of_bag, held_out_scores
from dist_ens.evaluation.scoring import without_failed
from dist_ens.experiment.assessment import Assessment, EvaluationRequest
from dist_ens.experiment.record import Run
from dist_ens.experiment.sources import open_test
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import BrokenMembersError, UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.layout import to_host
from dist_ens.metrics.catalogue import UNDER_SHIFT

_Answer = TypeVar("_Answer")


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
    from dist_ens.evaluation.calibration import Calibration, Predictor
    from dist_ens.evaluation.conformal import LEFT_OUT_BY
    from dist_ens.evaluation.fit_calibration import (
        calibrated_scores,
        conformal_scores,
        fit_map,
        fit_rule,
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
        predictor = Predictor.of(evaluator.ensemble, state, evaluator.left_out)
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
