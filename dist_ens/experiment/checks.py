"""Checks of a run's memory, network and data, before anything is written."""

import os

import jax

from dist_ens import cluster
from dist_ens.commands import quoted
from dist_ens.data import Source
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import check_microbatches
from dist_ens.errors import UserError, counted, first_line
from dist_ens.experiment.experiment import Experiment
from dist_ens.experiment.record import Run
from dist_ens.layout import BATCH, REPLICATED, device_bytes
from dist_ens.members import Member
from dist_ens.randomness import KEY_RULE
from dist_ens.state import described, leaf_type, leaf_types
from dist_ens.types import Batch


def check_room(ensemble: Ensemble, batch: Batch) -> None:
    """Checks that the state fits on its devices, before it is made.

    Args:
        ensemble: Ensemble to train.
        batch: Shapes and types of a batch.

    Raises:
        UserError: If a device has too little free memory for its members.
    """
    layout = ensemble.layout
    state = ensemble.abstract_state(batch)
    size: float = device_bytes(state)
    way_out = "Train fewer members"
    if layout.platform != "cpu":  # The members of other waves wait in the memory of the host.
        size /= ensemble.waves
        way_out += f", or in more than --config.layout.waves={ensemble.waves}"
    free = layout.free_bytes()
    if not cluster.as_main_sees(size <= free):
        raise UserError(
            f"The state of {counted(layout.num_members, 'member')} does not fit: a device of mesh "
            f"{layout} needs {size / 2**20:,.0f} MiB for its members and has {free / 2**20:,.0f} "
            f"MiB free. {way_out}; dist-ens plan with the same flags says how many fit."
        )


def check_training(run: Run, ensemble: Ensemble) -> None:
    """Checks the network of a run, by tracing it on the mesh with `train=True`.

    A loss function may call its network in any way. For it, only the microbatches and the fields
    without effect are checked.

    Args:
        run: Record of the run.
        ensemble: Ensemble to train.

    Raises:
        UserError: If the network raises an exception, or returns outputs or a model state of a
            wrong shape. Also if the batch has no equal microbatches, or a field is set that has no
            effect on a loss function.
    """
    batch_size = run.experiment.data.global_batch_size
    microbatches = run.experiment.compute.microbatches
    check_microbatches("compute.microbatches", microbatches, batch_size)
    objective = ensemble.trained_objective
    if objective is None:
        _check_fields_without_effect(run.experiment, has_own_step=ensemble.own_step is not None)
        return
    state = jax.eval_shape(
        lambda: ensemble.member.init(
            jax.random.key(0),
            jax.numpy.zeros((1, *run.spec.input_shape), run.spec.input_dtype),
        )
    )
    apply = ensemble.layout.map_rows(
        lambda params, model_state, x, key: ensemble.member.apply(
            params, model_state, x, key, True
        ),
        in_specs=(REPLICATED, REPLICATED, BATCH, REPLICATED),
        out_specs=(BATCH, REPLICATED),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        outputs, model_state = jax.eval_shape(apply, *state, run.batch(batch_size)["inputs"], key)
    except UserError:
        raise
    except Exception as error:  # The network of a user may raise anything.
        raise UserError(
            f"The network raised {type(error).__name__} with a key and train=True: "
            f"{first_line(error)} Correct the network."
        ) from error
    expected = (batch_size, *run.spec.label_shape, objective.num_outputs)
    if outputs.shape != expected or not jax.numpy.issubdtype(outputs.dtype, jax.numpy.floating):
        raise UserError(
            f"The network returned {leaf_type(outputs)} with train=True, and the objective takes "
            f"float{list(expected)}. Correct the network."
        )
    if leaf_types(model_state) != leaf_types(state[1]):
        raise UserError(
            f"With train=True the network returned a model state of {described(model_state)}, and "
            f"init made one of {described(state[1])}. Return the leaves of init with their shapes "
            "and types."
        )


def _check_fields_without_effect(experiment: Experiment, *, has_own_step: bool) -> None:
    """Raises a `UserError` if a field is set that has no effect on a loss function or own step."""
    of_loss = [
        "data.mean",
        "data.std",
        "compute.rematerialize",
        "evaluation.dropout_samples",
        "evaluation.pooling",
    ]
    of_step = [
        *of_loss[:-1],
        "compute.microbatches",
        "compute.dtype",
        "loss.options",
        *(["data.examples"] if experiment.data.examples == "bootstrap" else []),
    ]
    function = "make_step" if has_own_step else "make_loss"
    for path in of_step if has_own_step else of_loss:
        section, _, name = path.partition(".")
        fields = getattr(experiment, section)
        value = getattr(fields, name)
        if value != getattr(type(fields)(), name):
            raise UserError(
                f"{path}={value!r} has no effect, because {function} calls the network itself. "
                f"Leave the field out, and let {function} do what it stands for."
            )


def require_trained_on(run: Run, source: Source) -> None:
    """Checks that a source is the one that a run was trained on.

    Args:
        run: Record of the run.
        source: Source that the run's experiment names, or that was given.

    Raises:
        UserError: If the description, the number of examples, or an example differs.
    """
    recorded = run.examples or {}
    changed = [n for n, here in source.fingerprint.items() if recorded.get(n, here) != here]
    if source.spec != run.spec:
        here, there = source.spec.told_apart(run.spec)
    elif source.num_train_examples != run.num_train_examples:
        here, there = (
            f"{count:,} training examples"
            for count in (source.num_train_examples, run.num_train_examples)
        )
    elif changed:
        splits = " and ".join(changed)
        here, there = (
            f"{splits} examples with other values",
            f"the same number of {splits} examples",
        )
    else:
        return
    raise UserError(
        f"The data from {run.experiment.data.source} is not what the run was trained on: here "
        f"{here}, there {there}. Put the data set back. If make_source of a config file made it, "
        "give that file as config; if Python gave it, evaluate in Python with that source."
    )


def require_own_keys(run: Run, workdir: str | os.PathLike[str]) -> None:
    """Checks that this version of dist_ens draws the random numbers of a run.

    Args:
        run: Record of the run.
        workdir: Folder of the run, for the message.

    Raises:
        UserError: If another version drew them, from other keys.
    """
    if run.key_rule != KEY_RULE:
        raise UserError(
            f"{quoted(workdir)} holds a run of another version of dist_ens, whose members drew "
            "other random numbers. Use that version."
        )


def require_draws(member: Member, inputs: jax.ShapeDtypeStruct) -> None:
    """Raises a `UserError` unless a network draws random numbers with a key and `train=False`.

    Args:
        member: Network to check.
        inputs: Shape and type of a batch of inputs.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = jax.eval_shape(member.init, key, inputs)
    traced = jax.make_jaxpr(lambda p, s, x, k: member.apply(p, s, x, k, False)[0])(
        params, model_state, inputs, key
    )
    if "random_bits" not in str(traced):
        raise UserError(
            "The network has no dropout when it predicts (train=False), so all samples of "
            "evaluation.dropout_samples would be equal. Leave it out. Or keep dropout on wherever "
            'the network is given a key, in linen by deterministic=not self.has_rng("dropout").'
        )
