"""Building of a run from its record: the ensemble, the data and the evaluation."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dist_ens import cluster
from dist_ens.data import Source, check_source
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.fingerprint import fingerprint_of_step, versions
from dist_ens.errors import UserError
from dist_ens.evaluation import Evaluation, Evaluator, Scores
from dist_ens.evaluation.examples import Examples
from dist_ens.evaluation.scoring import score, score_directions
from dist_ens.experiment.checks import check_room, check_training, require_draws
from dist_ens.experiment.experiment import Experiment
from dist_ens.experiment.named import make_methods, make_model, make_objective
from dist_ens.experiment.optimizers import make_optimizer
from dist_ens.experiment.own_parts import OwnParts
from dist_ens.experiment.record import Run
from dist_ens.experiment.sources import open_source
from dist_ens.layout import Layout
from dist_ens.losses import Objective
from dist_ens.members import (
    Member,
    as_member,
    check_member,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.methods import Method, bootstrap
from dist_ens.randomness import KEY_RULE
from dist_ens.state import State
from dist_ens.training import EvalData, OrderedSplit
from dist_ens.types import Batch

NOTHING = OwnParts()


@dataclasses.dataclass(frozen=True)
class Built:
    """A run with all of its parts, made and checked.

    Attributes:
        run: Record of the run.
        source: Data of the run.
        ensemble: Ensemble to train.
        data: Training examples in their order.
        eval_data: Test split, with the function that scores it.
        parts: Parts of the run that its experiment does not name.
    """

    run: Run
    source: Source
    ensemble: Ensemble
    data: OrderedSplit
    eval_data: EvalData
    parts: OwnParts


def build(
    experiment: Experiment,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
) -> Built:
    """Makes and checks every part of a run, before anything is written.

    Args:
        experiment: Description of the run.
        parts: Parts in place of those that the experiment names.
        member_file: Path of the config file that gave parts.
        source: Data. Default: the one that `experiment.data` names.

    Raises:
        UserError: If a part cannot be made, or parts do not fit each other.
    """
    source = open_source(experiment.data) if source is None else source
    check_source(source, any_parts=not parts.has_objective)
    if not parts.has_objective and parts.metrics:
        raise UserError(
            f"The metric {parts.metrics[0].name!r} is computed from a predictive distribution, and "
            "the loss of this run is a function. Give an objective (make_objective in the config "
            "file), or return the metric from the loss as an auxiliary scalar."
        )
    if experiment.data.validation and source.valid is None:
        raise UserError(
            f"data.validation={experiment.data.validation} holds examples out of the source that "
            "the config names, and the source that was given has no validation split. Give "
            "source.with_validation(share)."
        )
    count = source.num_train_examples
    run = Run(experiment, source.spec, count, member_file, key_rule=KEY_RULE)
    rows = experiment.layout.ensemble_axis
    devices = cluster.devices_for(run.num_members, rows)
    layout = Layout.make(run.num_members, ensemble_axis=rows, devices=devices)
    layout.check_batch_size("data.global_batch_size", experiment.data.global_batch_size)
    ensemble = build_ensemble(run, layout, parts, source)
    data = OrderedSplit(source.train, run.order, experiment.seed)
    check_training(run, ensemble)
    check_room(ensemble, data.batch)
    run = identified(run, ensemble, parts, source, data.batch)
    return Built(run, source, ensemble, data, eval_data_of(run, source, parts), parts)


def objective_of(run: Run, parts: OwnParts = NOTHING) -> Objective | None:
    """Returns the objective of a run with the pooling of its experiment; None for a loss function.

    Args:
        run: Record of the run.
        parts: Parts that were given.

    Raises:
        UserError: If the labels do not fit the objective, it does not support the pooling, or it
            standardises the labels itself.
    """
    if not parts.has_objective:
        return None
    objective = parts.objective
    if objective is None:
        objective = make_objective(run.experiment.loss, run.spec.num_classes)
    elif getattr(objective, "standardize", False):
        raise UserError(
            f"make_objective returned {objective.name} with standardize=True, and a run from a "
            "config standardises no labels. Leave standardize out, and give standardised labels: a "
            "table, uci:FILE, has them."
        )
    distribution = objective.distribution.with_pooling(run.experiment.evaluation.pooling)
    if distribution is objective.distribution:
        return objective
    return dataclasses.replace(objective, distribution=distribution)


def evaluator_of_run(
    run: Run, ensemble: Ensemble, pooling: str | None = None, parts: OwnParts = NOTHING
) -> Evaluator:
    """Returns the evaluator of a run's ensemble.

    Args:
        run: Record of the run.
        ensemble: Ensemble of the run.
        pooling: Pooling of the members' predictions, one of `config.POOLINGS`. Default: that of the
            experiment.
        parts: Parts that were given.

    Raises:
        UserError: If the predictions do not support the pooling, or the loss is a function.
    """
    if ensemble.objective is None:
        raise UserError(
            "The loss of this run is a function, which says nothing of predictions. Give an "
            "objective (make_objective in the config file) to score and pool them."
        )
    distribution = ensemble.objective.distribution
    if pooling is not None:
        distribution = distribution.with_pooling(pooling)
    batch_size = run.experiment.evaluation.global_batch_size
    return Evaluator(ensemble, batch_size, run.spec, distribution, tuple(parts.metrics))


def eval_data_of(run: Run, source: Source, parts: OwnParts) -> EvalData:
    """Returns the test split of a run, with the function that scores it during and after training.

    Args:
        run: Record of the run.
        source: Data of the run.
        parts: Parts that were given.
    """
    examples = Examples(source.test, run.spec)

    def evaluate(
        ensemble: Ensemble, state: State, is_last: bool
    ) -> tuple[Scores, Evaluation | None]:
        return score(
            ensemble,
            state,
            examples,
            metrics=tuple(parts.metrics),
            batch_size=run.experiment.evaluation.global_batch_size,
            intervals=is_last,
            by_size=is_last,
        )

    def check(ensemble: Ensemble, batch: Batch) -> Mapping[str, str | None]:
        return score_directions(
            ensemble,
            batch,
            examples,
            metrics=tuple(parts.metrics),
            batch_size=run.experiment.evaluation.global_batch_size,
        )

    return EvalData("test", evaluate, check, source.test)


def methods_of(run: Run, source: Source | None = None) -> tuple[Method, ...]:
    """Returns the methods of a run, from the innermost to the outermost.

    Args:
        run: Record of the run.
        source: Data of the run, which is trained on. Default: the ranges of its inputs are 1.

    Raises:
        UserError: If a method does not fit the data.
    """
    spec = run.spec
    ones = np.ones((spec.num_groups, *spec.input_shape), np.float32)
    ranges = source.input_ranges if source else lambda: ones
    methods = make_methods(run.experiment.loss, spec, ranges)
    if run.experiment.data.examples == "bootstrap":
        methods.append(bootstrap())
    return tuple(methods)


def build_ensemble(
    run: Run,
    layout: Layout,
    parts: OwnParts = NOTHING,
    source: Source | None = None,
) -> Ensemble:
    """Returns the ensemble of a run, checked against the data.

    Args:
        run: Record of the run.
        layout: Layout of members and data, for any number of members.
        parts: Parts that were given.
        source: Data of the run, which is trained on; see `methods_of`.

    Raises:
        UserError: If the network cannot be made, or does not fit the data.
    """
    experiment, objective = run.experiment, objective_of(run, parts)
    methods = methods_of(run, source)
    ids = experiment.member_ids
    # A layout for another number of members is that of a plan.
    member_ids = ids if ids is not None and len(ids) == layout.num_members else None
    if parts.step is not None:
        return Ensemble.from_step(
            **parts.step,
            objective=objective,
            num_members=layout.num_members,
            member_ids=member_ids,
            seed=experiment.seed,
            layout=layout,
            execution=run.execution or experiment.execution,
            waves=experiment.layout.waves,
            failures=experiment.failures,
        )
    return Ensemble(
        _member_of(run, objective, parts),
        parts.optimizer or make_optimizer(experiment.optimizer),
        objective if parts.loss is None else parts.loss,
        num_members=layout.num_members,
        member_ids=member_ids,
        seed=experiment.seed,
        layout=layout,
        execution=run.execution or experiment.execution,
        methods=methods,
        waves=experiment.layout.waves,
        microbatches=experiment.compute.microbatches,
        compute_dtype=experiment.compute.dtype if parts.loss is not None else None,
        num_groups=run.spec.num_groups,
        dropout_samples=experiment.evaluation.dropout_samples,
        failures=experiment.failures,
    )


def _member_of(run: Run, objective: Objective | None, parts: OwnParts) -> Member:
    """Returns the network of a run. Its inputs are those of the source.

    Args:
        run: Record of the run.
        objective: Objective of the run; None for a loss function.
        parts: Parts that were given.

    Raises:
        UserError: If the network cannot be made, or does not fit the data or the experiment.
    """
    experiment, spec, data = run.experiment, run.spec, run.experiment.data
    for name in ("mean", "std"):
        length = len(getattr(data, name))
        if length not in {1, *spec.input_shape[-1:]}:
            raise UserError(
                f"data.{name} has {length} numbers for inputs {list(spec.input_shape)}. Give one "
                f"number, or one for each entry of the inputs' last axis, such as --config.data."
                f'{name}="(1.0,)".'
            )
    is_scaled = spec.standardization is not None and spec.standardization.has_inputs
    if is_scaled and (data.mean, data.std) != ((0.0,), (1.0,)):
        raise UserError(
            f"data.mean={data.mean} and data.std={data.std} were given for a table, whose inputs "
            "its source standardises. Leave them out."
        )
    if objective is None:
        if parts.member is None:
            raise UserError(
                "The config file defines a loss function and no network, and a loss function needs "
                "one. Define make_member(spec) too."
            )
        return as_member(parts.member)
    if parts.member is None:
        member = make_model(experiment.model, spec.input_shape, objective.num_outputs)
    else:
        member = as_member(parts.member)
    member = with_compute_dtype(member, experiment.compute.dtype)
    member = with_normalized_inputs(member, data.mean, data.std)
    if experiment.compute.rematerialize:
        member = rematerialized(member)
    inputs = run.batch(2)["inputs"]
    if experiment.evaluation.dropout_samples:
        require_draws(member, inputs)
    check_member(member, inputs, (2, *spec.label_shape, objective.num_outputs))
    return member


def identified(run: Run, ensemble: Ensemble, parts: OwnParts, source: Source, batch: Batch) -> Run:
    """Returns a run with fingerprints of its data and of the parts that were given.

    Args:
        run: Record of the run.
        ensemble: Ensemble of the run, on any layout.
        parts: Parts that were given.
        source: Data of the run.
        batch: Shapes and types of a global batch.
    """
    run = dataclasses.replace(run, examples=source.fingerprint)
    names = parts.names
    if parts.member is None and not names:
        return run
    return dataclasses.replace(
        run,
        network=ensemble.member.name if parts.member is not None else None,
        step=_step_of(run, ensemble, batch),
        versions=versions(),
        parts=names or None,
    )


def check_network(run: Run, ensemble: Ensemble, parts: OwnParts, batch: Batch) -> None:
    """Checks that the given parts are those that a run was trained with.

    Training steps are compared only if the same versions traced both.

    Args:
        run: Record of the run.
        ensemble: Ensemble of the run with the given parts.
        parts: Parts that were given.
        batch: Shapes and types of a global batch.

    Raises:
        UserError: If the training step differs.
    """
    if run.step is None or run.versions != versions():
        return
    if _step_of(run, ensemble, batch) != run.step:
        given = ", ".join([ensemble.member.name, *parts.names.values()])
        raise UserError(
            f"The parts that were given ({given}) compute another training step than those of this "
            f"run ({run.network or run.experiment.model.name}). Give those that it was trained "
            "with."
        )


def _step_of(run: Run, ensemble: Ensemble, batch: Batch) -> str:
    """Returns the fingerprint of a run's training step."""
    # The ranges of the inputs belong to the data, and the policy for failures may change on resume.
    plain = ensemble.replace(methods=methods_of(run), failures=None)
    return fingerprint_of_step(plain, batch)
