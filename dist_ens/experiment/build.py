"""Building of a run from its experiment: the data, the ensemble and the record."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dist_ens.checkpoint import StepRecord
from dist_ens.data import Source, Spec
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation.examples import Examples
from dist_ens.experiment.config_file import NOTHING, OwnParts
from dist_ens.experiment.named import (
    make_methods,
    make_model,
    make_objective,
    open_source,
)
from dist_ens.experiment.optimizers import make_optimizer, optimizer_options, own_fields
from dist_ens.experiment.reading import words_of_a_config
from dist_ens.experiment.record import Run
from dist_ens.experiment.schema import Experiment, LayoutConfig, Setting
from dist_ens.ground.errors import UserError, did_you_mean
from dist_ens.ground.types import Optimizer, OptimizerOfMember
from dist_ens.layout import Layout
from dist_ens.losses import Objective
from dist_ens.members import (
    Member,
    as_member,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.methods import Method, bootstrap
from dist_ens.metrics import Metric
from dist_ens.models.embeddings import embedding_size, with_embeddings
from dist_ens.processes import cluster
from dist_ens.training.evaluating import eval_data_of
from dist_ens.training.run_record import record_of

# Fields that say what happens to the inputs and outputs of a network.
_OF_NETWORK = ("data.mean", "data.std", "compute.rematerialize", "evaluation.dropout_samples")
_OF_STEP = ("compute.microbatches", "compute.dtype", "loss.options")


@dataclasses.dataclass(frozen=True)
class Built:
    """A run with its data and its ensemble."""

    run: Run
    source: Source
    ensemble: Ensemble
    parts: OwnParts

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `fit` beside the ensemble, the callbacks and the checkpoints, by name."""
        experiment, evaluation = self.run.experiment, self.run.experiment.evaluation
        metrics: Sequence[Metric | str] = (*evaluation.metrics, *self.parts.metrics)
        size = evaluation.global_batch_size
        spec, valid = self.run.spec, self.source.valid
        eval_data = eval_data_of(Examples(self.source.test, spec), None, metrics, batch_size=size)
        if valid is not None:  # What chooses a state must not see the test split.
            held_out = eval_data_of(None, Examples(valid, spec), metrics, batch_size=size)
            eval_data = dataclasses.replace(held_out, final=eval_data)
        return dict(
            data=self.source,
            steps=experiment.steps,
            epochs=experiment.epochs,
            batch_size=experiment.data.global_batch_size,
            order=self.run.order_rule,
            eval_data=eval_data,
            eval_every="epoch" if evaluation.every_epoch else evaluation.every_steps,
            steps_per_call=experiment.steps_per_call,
            log_every=experiment.logging.every_steps,
        )


@words_of_a_config()
def build(
    experiment: Experiment,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
) -> Built:
    """Makes the parts of a run, before anything is written."""
    source = open_source(experiment.data) if source is None else source
    member_file = member_file if parts.names or parts.metrics else None
    run = Run(experiment, source.spec, source.num_train_examples, member_file)
    layout = layout_for(run.num_members, experiment.layout)
    layout.check_batch_size("data.global_batch_size", experiment.data.global_batch_size)
    ensemble = build_ensemble(run, layout, parts, source)
    return Built(identified(run, ensemble, parts, source), source, ensemble, parts)


def layout_for(num_members: int, asked: LayoutConfig) -> Layout:
    """Returns the layout of some members on the devices of this run."""
    rows, is_whole = asked.ensemble_axis, asked.member_devices == 1
    return Layout.make(
        num_members,
        ensemble_axis=rows,
        model_axis=asked.member_devices,
        model_rules=asked.model_rules,
        devices=cluster.devices_for(num_members, rows) if is_whole else None,
    )


def layout_elsewhere(asked: LayoutConfig) -> LayoutConfig:
    """Returns the placement of a run's members on devices that need not be those of the run."""
    model_axis = 1 if jax.device_count() % asked.member_devices else asked.model_axis
    return dataclasses.replace(asked, ensemble_axis=None, model_axis=model_axis)


def objective_of(run: Run, parts: OwnParts = NOTHING) -> Objective | None:
    """Returns the objective of a run, with its pooling; None for a loss function."""
    if not parts.has_objective:
        return None
    spec, loss = run.spec, run.experiment.loss
    objective = parts.objective or make_objective(loss, spec.num_classes, spec.num_targets)
    if objective.standardize:
        raise UserError(
            f"make_objective returned {objective.name} with standardize=True. Leave it out, and "
            "give a source that standardises its labels."
        )
    distribution = objective.distribution.with_pooling(run.experiment.evaluation.pooling)
    if distribution is objective.distribution:
        return objective
    return dataclasses.replace(objective, distribution=distribution)


def methods_of(
    run: Run, parts: OwnParts = NOTHING, source: Source | None = None
) -> tuple[Method, ...]:
    """Returns the methods of a run, from the innermost; without a source, ranges are 1."""
    spec = run.spec
    ones = np.ones((spec.num_groups, *spec.input_shape), np.float32)
    methods = make_methods(run.experiment.loss, source.input_ranges if source else lambda: ones)
    of_inputs = [n for n in ("mixup", "adversarial") if run.experiment.loss.options.get(n)]
    if of_inputs and spec.table and spec.table.embedded:
        raise UserError(
            f"loss.{of_inputs[0]} would change the numbers of categories, of which a column has "
            f"{max(spec.table.embedded):,}. Leave it out, or the column by data.leave_out."
        )
    is_bootstrap = run.experiment.data.examples == "bootstrap"
    return (*methods, *parts.methods, *([bootstrap()] if is_bootstrap else []))


def fields_without_effect(experiment: Experiment, parts: OwnParts) -> list[str]:
    """Returns the fields that are set and that a loss function or an own step does not see."""
    if parts.step is None and parts.loss is None:
        return []
    found = []
    for path in (*_OF_NETWORK, *(_OF_STEP if parts.step else ["evaluation.pooling"])):
        section, _, name = path.partition(".")
        fields = getattr(experiment, section)
        value = getattr(fields, name)
        if value != getattr(type(fields)(), name):
            found.append(f"{path}={value!r}")
    if parts.step and experiment.data.examples == "bootstrap":
        found.append("data.examples='bootstrap'")
    if parts.step and parts.methods:
        found.append("make_methods")
    return found


@words_of_a_config()
def build_ensemble(
    run: Run, layout: Layout, parts: OwnParts = NOTHING, source: Source | None = None
) -> Ensemble:
    """Returns the ensemble of a run."""
    experiment, objective = run.experiment, objective_of(run, parts)
    if ignored := fields_without_effect(experiment, parts):
        raise UserError(
            f"{ignored[0]} has no effect, because {'make_step' if parts.step else 'make_loss'} "
            "calls the network itself. Leave it out."
        )
    of_all: dict[str, Any] = dict(
        num_members=layout.num_members,
        # A layout for another number of members is that of a plan.
        member_ids=experiment.member_ids if layout.num_members == run.num_members else None,
        seed=experiment.seed,
        layout=layout,
        execution=run.execution,
        waves=experiment.layout.waves,
        failure_policy=experiment.failures,
        hyper=_settings_of(experiment, layout.num_members == run.num_members),
        shared=parts.shared,
    )
    if parts.step is not None:
        return Ensemble.from_step(**parts.step, objective=objective, **of_all)
    return Ensemble(
        _member_of(run, objective, parts),
        parts.optimizer or _optimizer_of(experiment, has_own_parts=bool(parts.names)),
        objective if parts.loss is None else parts.loss,
        methods=methods_of(run, parts, source),
        microbatches=experiment.compute.microbatches,
        compute_dtype=experiment.compute.dtype if parts.loss is not None else None,
        num_groups=run.spec.num_groups,
        dropout_samples=experiment.evaluation.dropout_samples,
        **of_all,
    )


def _settings_of(experiment: Experiment, has_all: bool) -> Mapping[str, Setting] | None:
    """Returns the settings of the members; in a plan for other members, one value of each list."""
    options = experiment.hyper.options
    one = {n: v[0] if isinstance(v, tuple) and not has_all else v for n, v in options.items()}
    return one or None


def _optimizer_of(experiment: Experiment, *, has_own_parts: bool) -> OptimizerOfMember:
    """Returns the optimizer of all members, or a function that makes that of one of them."""
    config = experiment.optimizer
    optimizer = make_optimizer(config)
    if not experiment.hyper.options:
        return optimizer
    options = optimizer_options(config.name)
    numbers = {name for name, (_, kind) in options.items() if kind is float}
    known = {*numbers, *own_fields(config.name), "clip_norm"}
    known |= {"dropout_rate"} if experiment.model.name == "mlp_bn_dropout" else set()
    for name in experiment.hyper.options:
        if not has_own_parts and name not in known:
            raise UserError(
                f"Nothing reads hyper.{name}.{did_you_mean(name, known)} With optimizer.name="
                f"{config.name!r} and model.name={experiment.model.name!r}, hyper may have "
                f"{', '.join(sorted(known))}."
            )

    def of_member(hyper: Mapping[str, jax.Array]) -> Optimizer:
        return make_optimizer(config, hyper)

    of_member.__qualname__ = config.name
    return of_member


def _member_of(run: Run, objective: Objective | None, parts: OwnParts) -> Member:
    """Returns the network of a run. Its inputs are those of the source."""
    experiment, data = run.experiment, run.experiment.data
    if objective is None:
        if parts.member is None:
            raise UserError("A loss function needs a network. Define make_member(spec) too.")
        return as_member(parts.member)
    if parts.member is None:
        member = make_model(experiment.model, _network_shape(run.spec), objective.num_outputs)
    else:
        member = as_member(parts.member)
    given = run.spec.standardization
    if given is not None and given.has_inputs and (data.mean, data.std) != ((0.0,), (1.0,)):
        raise UserError(
            f"data.mean={data.mean} and data.std={data.std} were given for a table, whose inputs "
            "are standardised already. Leave them out."
        )
    member = with_compute_dtype(member, experiment.compute.dtype)
    member = with_normalized_inputs(member, data.mean, data.std)
    if run.spec.table is not None and run.spec.table.embedded:
        member = with_embeddings(member, run.spec.table.embedded)
    return rematerialized(member) if experiment.compute.rematerialize else member


def _network_shape(spec: Spec) -> tuple[int, ...]:
    """Returns the shape of an input of the network, which has vectors in place of categories."""
    if spec.table is None:
        return spec.input_shape
    sizes = [embedding_size(count) for count in spec.table.embedded]
    return (spec.input_shape[0] - len(sizes) + sum(sizes),)


def identified(run: Run, ensemble: Ensemble, parts: OwnParts, source: Source) -> Run:
    """Returns a run with its record, the fingerprints of its data, and the names of its parts."""
    splits = source.fingerprint
    record = dataclasses.replace(
        record_of_run(run, ensemble, parts),
        num_examples=len(source.train),
        num_groups=source.spec.num_groups,
        class_names=source.spec.class_names,
        examples=splits.get("train"),
    )
    return dataclasses.replace(run, splits=splits, parts=parts.names, record=record)


def record_of_run(run: Run, ensemble: Ensemble, parts: OwnParts) -> StepRecord:
    """Returns the record of a run's ensemble, without the facts of its data."""
    if ensemble.own_step is None:
        # The ranges of the inputs, which some methods hold, belong to the data.
        ensemble = ensemble.replace(methods=methods_of(run, parts))
    return record_of(ensemble, run.batch(run.experiment.data.global_batch_size))
