"""A run: an experiment and its data's description, the ensemble made of them, and its workdir."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dist_ens import cluster
from dist_ens.commands import quoted
from dist_ens.config import (
    MAY_CHANGE_ON_RESUME,
    Experiment,
    differences_on_resume,
    fields_from_record,
    whole_number,
)
from dist_ens.config.execution_spec import AUTO, Execution
from dist_ens.data import Source, Spec
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.fingerprint import fingerprint_of_step, versions
from dist_ens.errors import RunError, UserError, first_line
from dist_ens.evaluation import Evaluator, Kind, kind_of
from dist_ens.layout import BATCH, DATA, REPLICATED, Layout, Waves, device_bytes
from dist_ens.losses import Objective, make_objective
from dist_ens.members import (
    Member,
    check_member,
    check_modes,
    rematerialized,
    with_compute_dtype,
    with_normalized_inputs,
)
from dist_ens.methods import Method, adversarial, label_smoothing, mixup, poisson_weight
from dist_ens.models import make_model
from dist_ens.optimizers import make_optimizer
from dist_ens.sampling import Order


@dataclasses.dataclass(frozen=True)
class Run:
    """What a checkpoint's state belongs to.

    Attributes:
        experiment: The resolved experiment.
        spec: Of the data that the members take.
        num_train_examples: That a member is trained on; their order depends on their number.
        member_file: The config file that defines the member; None where there is none.
        execution: How members are run, where the experiment leaves it to be chosen; None before.
        num_devices: Of the mesh that trains; None before.
        network: Name of the network that a config file or Python gave; None where `model.name`
            says which it is.
        step: Fingerprint of the training step with that network; None where there is no `network`.
        versions: Versions of what traced the step, by name; None likewise.
        examples: Fingerprints of the examples by the name of their split; None if not known.
    """

    experiment: Experiment
    spec: Spec
    num_train_examples: int
    member_file: str | None = None
    execution: str | None = None
    num_devices: int | None = None
    network: str | None = None
    step: str | None = None
    versions: Mapping[str, str] | None = None
    examples: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "experiment": self.experiment.to_dict(),
            "spec": self.spec.to_dict(),
            "num_train_examples": self.num_train_examples,
            "member_file": self.member_file,
            "execution": self.execution,
            "num_devices": self.num_devices,
            "network": self.network,
            "step": self.step,
            "versions": self.versions and dict(self.versions),
            "examples": self.examples and dict(self.examples),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Run":
        """Reads back `to_dict`, also through JSON.

        Args:
            values: What was written; every field is checked for its type and range.

        Returns:
            The run. What an older version did not write is None.

        Raises:
            RunError: If a field is absent, unknown, or not what it can be.
        """
        try:
            readers = {"experiment": Experiment.from_dict, "spec": Spec.from_dict}
            return cls(**fields_from_record(cls, values, readers))
        except UserError as error:
            raise RunError(
                f"The record of a run cannot be read: {error} It is damaged, or another version of "
                "dist_ens wrote it: read it with that version, or train anew in another folder."
            ) from error

    def __post_init__(self) -> None:
        whole_number("num_train_examples", self.num_train_examples, least=0)
        if self.execution is not None:
            Execution.parse(self.execution)
        if self.num_devices is not None:
            whole_number("num_devices", self.num_devices, least=1)

    def batch_of_inputs(self, batch_size: int) -> jax.ShapeDtypeStruct:
        """Shape and type of a batch of inputs as the source yields them."""
        return jax.ShapeDtypeStruct((batch_size, *self.spec.input_shape), self.spec.input_dtype)

    @property
    def has_own_network(self) -> bool:
        """Whether a config file or Python gave the network, and not `model.name`."""
        return self.network is not None or self.member_file is not None

    @property
    def order(self) -> Order:
        """In which the training examples come."""
        data = self.experiment.data
        if data.examples == "bootstrap" and self.num_train_examples == 1:
            raise UserError(
                "A bootstrap sample is drawn from several examples. Received: one. Add data, or "
                "set --config.data.examples=shared."
            )
        return Order(
            self.num_train_examples,
            data.global_batch_size,
            shuffle=data.shuffle,
            per_member=self.per_member,
            num_groups=self.spec.num_groups,
            num_folds=data.num_folds or 0,
        )

    @property
    def per_member(self) -> bool:
        """Whether each member has batches of its own."""
        examples = self.experiment.data.examples
        return examples not in ("shared", "bootstrap") or self.spec.num_groups > 1

    @property
    def num_members(self) -> int:
        """Networks in the ensemble."""
        return self.experiment.total_members(self.spec.num_groups)

    def kind(self, pooling: str | None = None) -> Kind:
        """How the members' outputs are read, and pooled.

        Args:
            pooling: One of `config.POOLINGS`; default: the experiment's.

        Raises:
            UserError: If such predictions are not pooled in this way.
        """
        return kind_of(self.objective, pooling or self.experiment.evaluation.pooling)

    def evaluator(self, ensemble: Ensemble, pooling: str | None = None) -> Evaluator:
        """What scores the run's ensemble, and predicts with it.

        Args:
            ensemble: From `make_ensemble`.
            pooling: See `kind`.

        Raises:
            UserError: If such predictions are not pooled in this way.
        """
        batch_size = self.experiment.evaluation.global_batch_size
        return Evaluator(ensemble, batch_size, self.spec, self.kind(pooling))

    @property
    def objective(self) -> Objective:
        """What members minimise."""
        return make_objective(self.experiment.loss, self.spec.num_classes)

    def methods(self, input_ranges: np.ndarray | None) -> tuple[Method, ...]:
        """What is done to the members' loss, the first the innermost.

        Args:
            input_ranges: Of the training data, from `Source.input_ranges`; to train adversarially.

        Raises:
            UserError: If the data's labels or inputs forbid it.
        """
        loss, spec = self.experiment.loss, self.spec
        if (loss.adversarial or loss.mixup) and spec.label_shape:
            raise UserError(
                "Characters are neither mixed nor moved a little. Received: "
                f"loss.mixup={loss.mixup}, loss.adversarial={loss.adversarial} for a text. Set "
                "both to 0."
            )
        methods: list[Method] = []
        if loss.label_smoothing and spec.num_classes is not None:
            methods.append(label_smoothing(loss.label_smoothing, spec.num_classes))
        if loss.adversarial:
            methods.append(adversarial(loss.adversarial, input_ranges))
        if loss.mixup:
            methods.append(mixup(loss.mixup, spec.num_classes))
        return tuple(methods)

    def make_ensemble(
        self,
        layout: Layout,
        member: Member | None = None,
        input_ranges: np.ndarray | None = None,
    ) -> Ensemble:
        """The experiment's member, checked against the data and lifted.

        Args:
            layout: Where members and data lie.
            member: The network; None for the one that `model.name` says.
            input_ranges: As `methods` takes them.

        Returns:
            The ensemble.

        Raises:
            UserError: If the network cannot be made, or does not fit the data.
        """
        experiment, spec, objective = self.experiment, self.spec, self.objective
        methods = self.methods(input_ranges)
        for name in ("mean", "std"):
            length = len(getattr(experiment.data, name))
            if length not in {1, *spec.input_shape[-1:]}:
                raise UserError(
                    f"data.{name} is one number, or one per entry of the inputs' last axis. "
                    f"Received: {length} for inputs {list(spec.input_shape)}. Try "
                    f'--config.data.{name}="(1.0,)".'
                )
        data = experiment.data
        if spec.standardization and (data.mean, data.std) != ((0.0,), (1.0,)):
            raise UserError(
                "A table's inputs are standardised by its source. Received: data.mean="
                f"{data.mean}, data.std={data.std} beside it. Leave them out."
            )
        if member is None:
            member = make_model(experiment.model, spec.input_shape, objective.num_outputs)
        member = with_compute_dtype(member, experiment.compute.dtype)
        member = with_normalized_inputs(member, experiment.data.mean, experiment.data.std)
        if experiment.compute.rematerialize:
            member = rematerialized(member)
        if experiment.evaluation.dropout_samples:
            _require_draws(member, self.batch_of_inputs(2))
        batch_size = 2
        check_member(
            member,
            self.batch_of_inputs(batch_size),
            (batch_size, *spec.label_shape, objective.num_outputs),
        )
        return Ensemble(
            member,
            make_optimizer(experiment.optimizer),
            layout,
            objective.loss,
            objective.training_scores,
            methods=methods,
            example_weight=poisson_weight if experiment.data.examples == "bootstrap" else None,
            microbatches=experiment.compute.microbatches,
            execution=self.execution
            or ("vmap" if experiment.execution == AUTO else experiment.execution),
            waves=Waves.at_least(layout, experiment.layout.waves).count,
            num_groups=spec.num_groups,
            dropout_samples=experiment.evaluation.dropout_samples,
        )

    def check_room(self, ensemble: Ensemble) -> None:
        """Raises where the state alone is more than there is room for, before any of it is made.

        Raises:
            UserError: If it is.
        """
        layout = ensemble.layout
        state = ensemble.abstract_state(self.batch_of_inputs(1))
        size: float = device_bytes(state)
        way_out = "Train fewer"
        if layout.platform != "cpu":  # members of other waves wait in the memory of the host
            size /= ensemble.waves
            way_out += f", or in more than --config.layout.waves={ensemble.waves}"
        free = layout.free_bytes()
        if not cluster.as_main_sees(size <= free):
            raise UserError(
                "A device has room for the state of its members. Received: "
                f"{layout.num_members:,} members, of which a device of mesh {layout} needs "
                f"{size / 2**20:,.0f} MiB and has {free / 2**20:,.0f} free. {way_out}; dist-ens "
                "plan with the same flags tells how many fit."
            )

    def check_training(self, ensemble: Ensemble) -> None:
        """Traces the network as it is trained, on the mesh, and raises where it does not fit.

        Raises:
            UserError: If it raises, or returns other outputs or another model state than it should,
                or a device's batch has no such microbatches.
        """
        batch_size = self.experiment.data.global_batch_size
        microbatches = self.experiment.compute.microbatches
        device_batch_size = batch_size // ensemble.layout.data_axis
        if device_batch_size % microbatches:
            raise UserError(
                "Microbatches are equal parts of a device's batch. Received: "
                f"compute.microbatches={microbatches} for {device_batch_size} examples. Choose a "
                f"divisor of {device_batch_size}."
            )
        state = jax.eval_shape(
            lambda: ensemble.member.init(
                jax.random.key(0),
                jax.numpy.zeros((1, *self.spec.input_shape), self.spec.input_dtype),
            )
        )
        apply = ensemble.layout.shard_map(
            lambda params, model_state, x, key: ensemble.member.apply(
                params, model_state, x, key, True
            ),
            in_specs=(REPLICATED, REPLICATED, BATCH, REPLICATED),
            out_specs=(BATCH, REPLICATED),
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        try:
            outputs, model_state = jax.eval_shape(
                apply, *state, self.batch_of_inputs(batch_size), key
            )
        except UserError:
            raise
        except Exception as error:  # whatever a user's network says when it is trained
            raise UserError(
                "The network must take a key and train=True. Received, when it was trained: "
                f"{type(error).__name__}: {first_line(error)} Correct the network."
            ) from error
        expected = (batch_size, *self.spec.label_shape, self.objective.num_outputs)
        if outputs.shape != expected or not jax.numpy.issubdtype(outputs.dtype, jax.numpy.floating):
            raise UserError(
                f"Trained or not, the network returns float{list(expected)}. Received, when it was "
                f"trained: {outputs.dtype}{list(outputs.shape)}. Correct the network."
            )
        before, after = (
            [
                (jax.tree_util.keystr(path), leaf.shape, leaf.dtype)
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            ]
            for tree in (state[1], model_state)
        )
        if before != after:
            raise UserError(
                "Trained or not, the network returns the model state as init made it, leaf by "
                f"leaf. Received, when it was trained: {after} instead of {before}. Correct the "
                "network."
            )
        check_modes(ensemble.member, self.batch_of_inputs(2), DATA)

    def _other_examples(self, saved: "Run") -> list[tuple[str, str, str]]:
        """Returns the splits whose examples are others than those of another run."""
        if saved.examples is None or self.examples is None:
            return []
        return [
            (f"the {name} examples' fingerprint", _digits(saved.examples[name]), _digits(here))
            for name, here in self.examples.items()
            if saved.examples.get(name, here) != here
        ]

    def _other_network(self, saved: "Run") -> list[tuple[str, Any, Any]]:
        """Returns the networks of another run and of this one, unless they are the same."""
        if saved.examples is None:  # an older version did not write which network it was
            there, here = saved.member_file, self.member_file
            other = (there is None) != (here is None)
            return [("the network's file", there, here)] if other else []
        by_name = f"{self.experiment.model.name} (model.name)"
        there, here = (run.network or by_name for run in (saved, self))
        if (saved.network is None) != (self.network is None):
            return [("the network", there, here)]
        if saved.step is None or self.step is None:
            return []
        if saved.versions != self.versions:  # which is said
            return []
        if saved.step == self.step:
            return []
        return [
            (
                "the training step of the network",
                f"{there}, {_digits(saved.step)}",
                f"{here}, {_digits(self.step)}",
            )
        ]

    def other_versions(self, saved: "Run") -> str | None:
        """Returns a sentence on versions that keep two training steps from being compared."""
        if saved.versions is None or self.versions is None or saved.versions == self.versions:
            return None
        names = sorted(saved.versions.keys() | self.versions.keys())
        pairs = [(name, saved.versions.get(name), self.versions.get(name)) for name in names]
        listed = ", ".join(
            f"{name} {there or 'absent'} (here {here or 'absent'})"
            for name, there, here in pairs
            if there != here
        )
        return (
            f"The run was begun with {listed}, so that its training step cannot be compared with "
            f"the one here. Its network was {saved.network}, and here it is {self.network}: going "
            "on as if they were the same."
        )

    def identified(self, ensemble: Ensemble, member: Member | None, source: Source) -> "Run":
        """Returns this run with fingerprints of what its experiment does not name.

        Args:
            ensemble: From `make_ensemble`, of any layout.
            member: Network that was given; None for the one that `model.name` says.
            source: Data of the run.
        """
        run = dataclasses.replace(self, examples=source.fingerprint)
        if member is None:
            return run
        return dataclasses.replace(
            run, network=member.name, step=self._step_with(ensemble), versions=versions()
        )

    def check_network(self, ensemble: Ensemble, member: Member | None) -> None:
        """Checks that a network that was given is the one that this run was trained with.

        Networks can be compared where the same versions trace them; otherwise nothing is checked.

        Raises:
            UserError: If its training step is another one.
        """
        if member is None or self.step is None or self.versions != versions():
            return
        if self._step_with(ensemble) != self.step:
            raise UserError(
                f"The network given, {member.name}, computes another training step than the "
                f"network of this run, {self.network}. Give the network that it was trained with."
            )

    def _step_with(self, ensemble: Ensemble) -> str:
        # Of the inputs' ranges, which are of the data, the step is to say nothing.
        ranges = np.ones((self.spec.num_groups, *self.spec.input_shape), np.float32)
        plain = dataclasses.replace(ensemble, methods=self.methods(ranges))
        return fingerprint_of_step(plain, self.spec, self.experiment.data.global_batch_size)

    def check_goes_on_from(self, saved: "Run", workdir: pathlib.Path) -> None:
        """Checks that this run may go on from another, as far as both are identified.

        Raises:
            UserError: If they differ in what a step computes; the message names both values.
        """
        different = differences_on_resume(saved.experiment, self.experiment)
        for name in ("spec", "num_train_examples"):
            a, b = getattr(saved, name), getattr(self, name)
            if a != b:
                told = a.told_apart(b) if name == "spec" else (str(a), str(b))
                different.append((f"the data's {name}", *told))
        if not different:
            different += self._other_examples(saved) + self._other_network(saved)
        if different:
            listed = "; ".join(f"{name} is {a!r} there and {b!r} here" for name, a, b in different)
            raise UserError(
                f"{quoted(workdir)} holds another run: {listed}. Choose another --workdir for this "
                f"one, or resume that one: only {', '.join(MAY_CHANGE_ON_RESUME)} may change."
            )


def _digits(fingerprint: str) -> str:
    """Returns as many digits of a fingerprint as a message needs."""
    return fingerprint[:12]


def _require_draws(member: Member, inputs: jax.ShapeDtypeStruct) -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = jax.eval_shape(member.init, key, inputs)
    traced = jax.make_jaxpr(lambda p, s, x, k: member.apply(p, s, x, k, False)[0])(
        params, model_state, inputs, key
    )
    if "random_bits" not in str(traced):
        raise UserError(
            "Samples of a prediction differ by what the network draws when it is given a key. "
            "Received: evaluation.dropout_samples for a network that draws nothing with train=False"
            ". Leave it out, or let a key switch its dropout on, as in linen by deterministic=not "
            'self.has_rng("dropout").'
        )
