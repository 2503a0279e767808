"""A run's workdir: held by one run at a time, and its newest checkpoint opened."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

from filelock import FileLock, Timeout

from dist_ens import cluster
from dist_ens.checkpoint import FOLDER, Checkpoints
from dist_ens.commands import option, quoted
from dist_ens.data import Spec
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.experiment.record import Run
from dist_ens.layout import make_layout
from dist_ens.members import Member, require_member
from dist_ens.paths import given_path
from dist_ens.state import State


@contextlib.contextmanager
def trained_by_one(workdir: pathlib.Path) -> Iterator[None]:
    """Holds a workdir for one run; the system lets go of it when the run ends, however it does.

    Raises:
        UserError: If another run holds it; on every host.
    """
    lock = FileLock(workdir / ".lock")
    held = True
    if cluster.is_main():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            held = False
    if not cluster.as_main_sees(held):
        raise UserError(
            f"One run at a time trains in a workdir. Received: {workdir}, where another process "
            "is training now. Wait for it, stop it, or choose another --workdir."
        )
    try:
        yield
    finally:
        lock.release()


def saved_run(workdir: pathlib.Path) -> tuple[int, Run] | None:
    """Step and run of the newest checkpoint in a workdir; None where there is none."""
    if not cluster.as_main_sees((workdir / FOLDER).is_dir()):
        return None
    with Checkpoints(workdir, read_only=True) as checkpoints:
        step = cluster.as_main_sees(checkpoints.latest_step() or 0)
        return (step, Run.from_dict(checkpoints.restore_run(step))) if step else None


def open_finished(
    workdir: pathlib.Path,
    make_member: Callable[[Spec], Member | None] | None = None,
    *,
    dropout_samples: int | None = None,
) -> tuple[Run, Ensemble, State]:
    """The newest checkpoint of a workdir, on the devices at hand.

    Args:
        workdir: Of a run that has saved at least once.
        make_member: Makes the network, where the run's was not one that `model.name` says.
        dropout_samples: In place of the experiment's `evaluation.dropout_samples`; 0: none are
            drawn.

    Returns:
        What the state belongs to, the ensemble, and its state on a layout for these devices.

    Raises:
        UserError: If there is no checkpoint, or the network is needed and not given.
    """
    workdir = given_path(workdir, "workdir")
    saved = saved_run(workdir)
    if saved is None:
        raise UserError(
            f"A run is read from its newest checkpoint. Received: {workdir}, which has none. "
            "Train first, or correct --workdir."
        )
    step, run = saved
    if dropout_samples is not None:
        evaluation = dataclasses.replace(
            run.experiment.evaluation, dropout_samples=dropout_samples or None
        )
        run = dataclasses.replace(
            run, experiment=dataclasses.replace(run.experiment, evaluation=evaluation)
        )
    member = _network_of(run, workdir, make_member)
    layout = make_layout(run.num_members, devices=cluster.devices_for(run.num_members))
    ensemble = run.make_ensemble(layout, member)
    run.check_network(ensemble, member)
    abstract = ensemble.abstract_state(run.batch_of_inputs(1))
    with Checkpoints(workdir, read_only=True) as checkpoints:
        return run, ensemble, checkpoints.restore_state(step, abstract)


def _network_of(
    run: Run, workdir: pathlib.Path, make_member: Callable[[Spec], Member | None] | None
) -> Member | None:
    """Returns the network that somebody gives for a run; None where `model.name` says it.

    Raises:
        UserError: If one is needed and not given, or given and not needed.
    """
    member = make_member(run.spec) if make_member else None
    if member is not None:
        require_member(member)
    if run.has_own_network and member is None:
        if run.member_file is None:
            raise UserError(
                f"The network of the run in {quoted(workdir)}, {run.network}, was given in "
                "Python, and none is given here. Open the run in Python, as by "
                "open_finished(workdir, lambda spec: member)."
            )
        raise UserError(
            f"The network of the run in {quoted(workdir)} is defined in its config file, which is "
            f"not run unasked. Add {option('config', run.member_file)}."
        )
    is_known = run.examples is not None  # an older version did not write which network it was
    if is_known and not run.has_own_network and member is not None:
        raise UserError(
            f"The network of the run in {quoted(workdir)} is {run.experiment.model.name!r}, by "
            f"model.name, and another one is given: {member.name}. Leave out --config, or the "
            "network."
        )
    return member
