"""Members of a run as single networks: exported to files, and imported from files."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from dist_ens.checkpoint import (
    Lineage,
    SavedMembers,
    moving_on,
    positions_of,
    require_new_folder,
    saved_step,
)
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.lineage import Event
from dist_ens.data import Source
from dist_ens.experiment.build import build
from dist_ens.experiment.config_file import NOTHING, OwnParts
from dist_ens.experiment.members import require_folder, write_run
from dist_ens.experiment.network_files import network_paths, parts_from, read_network, write_network
from dist_ens.experiment.schema import Experiment


def export_members(
    workdir: pathlib.Path,
    to: pathlib.Path,
    *,
    member_ids: Sequence[int] | None = None,
    step: int | None = None,
) -> list[pathlib.Path]:
    """Writes each member of a run as a safetensors file of one network, and returns the paths.

    The names in a file are those of the network, such as `Dense_0.kernel`. The parameters are those
    with which the member is evaluated, such as the averages of a schedule-free optimizer.
    """
    require_new_folder(to, [])
    return moving_on(step, lambda: _exported(workdir, to, member_ids, step))


def _exported(
    workdir: pathlib.Path, to: pathlib.Path, member_ids: Sequence[int] | None, step: int | None
) -> list[pathlib.Path]:
    """Writes each member as a file; see `export_members`."""
    saved = saved_step(workdir, step)
    ids = [member.member_id for member in saved.members] if member_ids is None else member_ids
    digits, paths = max(2, len(str(max(ids)))), []
    for position in positions_of(ids, saved.members):  # Only one member is in memory at a time.
        member = saved.members[position]
        path = to / f"member_{member.member_id:0{digits}}.safetensors"
        leaves = {name: leaf[0] for name, leaf in saved.leaves([member.member_id]).items()}
        write_network(path, _for_evaluation(leaves), member, saved.step)
        paths.append(path)
    return paths


def _for_evaluation(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the leaves of a member with the parameters with which it is evaluated.

    It does what `dist_ens.ensemble.optimizer.evaluation_params` does, with names for the classes.
    """
    found = dict(leaves)

    def replace(held: str, evaluated: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        for name in leaves:
            if name == held or name.startswith(f"{held}."):
                of_params = f"params{name.removeprefix(held)}"
                params = found[of_params]
                found[of_params] = evaluated(params, leaves[name]).astype(params.dtype)

    # A user's own step may keep optimizers in its state. Its apply knows what it evaluates.
    of_optimizer = [name for name in leaves if name.startswith("opt_state.")]
    for name in of_optimizer:
        state, _, last = name.rpartition(".")
        if last == "steps_since_sync" and leaves[name] != 0:  # of optax.contrib.sam
            replace(f"{state}.cache", lambda _, outer: outer)
    for name in of_optimizer:
        state, _, last = name.rpartition(".")
        if last == "weight_sum" and f"{state}.b1" in leaves:  # of a schedule-free optimizer
            replace(f"{state}.z", partial(_averaged, leaves[f"{state}.b1"]))
    return found


def _averaged(b1: np.ndarray, params: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Returns the averages of a schedule-free optimizer, as Optax computes them."""
    return (params - (1 - b1) * z) / b1


def import_members(
    networks: Sequence[str],
    experiment: Experiment,
    to: pathlib.Path,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
) -> SavedMembers:
    """Writes a new run, at its last step, whose members are networks that were trained elsewhere.

    Without `experiment.member_ids` the number of members is that of the networks. The optimizer
    has a new state.
    """
    require_folder(to)
    paths = network_paths(networks)
    if experiment.member_ids is None:
        experiment = experiment.with_members(range(len(paths)))
    layout = dataclasses.replace(experiment.layout, ensemble_axis=None, waves=1)
    experiment = dataclasses.replace(experiment, layout=layout)
    built = build(experiment, parts=parts, member_file=member_file, source=source)
    ensemble = built.ensemble
    batch_size = experiment.data.global_batch_size
    like = ensemble.abstract_state(built.run.batch(batch_size))
    of_one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        (like.params, like.model_state),
    )
    members = [parts_from(read_network(path), of_one, path) for path in paths]
    state = ensemble.state_of(
        [params for params, _ in members], [model_state for _, model_state in members]
    )
    step = built.run.num_steps
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    # The state counts steps modulo 2^32.
    leaves["step"] = np.full(len(paths), step % 2**32, np.uint32).astype(leaves["step"].dtype)
    lineages = tuple(
        Lineage(
            int(member_id),
            run=str(path.resolve()),
            events=(Event(step, f"imported from {path.resolve()}"),),
        )
        for member_id, path in zip(ensemble.ids, paths, strict=True)
    )
    return write_run(to, SavedMembers(step, built.run.to_dict(), lineages, leaves))
