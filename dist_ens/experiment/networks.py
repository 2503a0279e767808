"""Members of a run as single networks: exported to files, and imported from files.

The name of an array in a file has the keys of the nested dicts, joined by dots, without a further
prefix: `Dense_0.kernel` of the parameters, `batch_stats.BatchNorm_0.mean` of the model state.
"""

import dataclasses
import glob
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import numpy as np
import safetensors
import safetensors.numpy

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
from dist_ens.checkpoint.network_files import (
    BASE,
    ROOTS,
    SUFFIXES,
    base_digest_in,
    is_orbax,
    keep_shared,
    parts_from,
    read_network,
)
from dist_ens.data import Source
from dist_ens.experiment.build import build, layout_elsewhere
from dist_ens.experiment.config_file import NOTHING, OwnParts
from dist_ens.experiment.members import require_folder, write_run
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, code_of_write, first_line
from dist_ens.ground.paths import given_path, shortened
from dist_ens.storage import Folder, Place, place_of


def export_members(
    folder: Folder,
    to: Folder,
    *,
    member_ids: Sequence[int] | None = None,
    step: int | None = None,
) -> list[str]:
    """Writes each member of a run as a safetensors file of one network, and returns the paths.

    The names in a file are those of the network, such as `Dense_0.kernel`. The parameters are those
    with which the member is evaluated, such as the averages of a schedule-free optimizer.
    """
    to = place_of(to, "to")
    require_new_folder(to, [])

    def exported() -> list[str]:
        saved = saved_step(folder, step)
        ids = [member.member_id for member in saved.members] if member_ids is None else member_ids
        digits, paths = max(2, len(str(max(ids)))), []
        for position in positions_of(ids, saved.members):  # Only one member is in memory at a time.
            member = saved.members[position]
            name = f"member_{member.member_id:0{digits}}.safetensors"
            leaves = {name: leaf[0] for name, leaf in saved.leaves([member.member_id]).items()}
            base = saved.run.get("shared")
            write_network(to, name, _for_evaluation(leaves), member, saved.step, base)
            paths.append(f"{to}/{name}")
        return paths

    return moving_on(step, exported)


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
    to: Folder,
    *,
    parts: OwnParts = NOTHING,
    member_file: str | None = None,
    source: Source | None = None,
) -> SavedMembers:
    """Writes a new run, at its last step, whose members are networks that were trained elsewhere.

    Without `experiment.member_ids` the number of members is that of the networks. The optimizer
    has a new state.
    """
    to = place_of(to, "to")
    require_folder(to)
    paths = network_paths(networks)
    if experiment.member_ids is None:
        experiment = experiment.with_members(range(len(paths)))
    layout = dataclasses.replace(layout_elsewhere(experiment.layout), waves=1)
    experiment = dataclasses.replace(experiment, layout=layout)
    built = build(experiment, parts=parts, member_file=member_file, source=source)
    ensemble = built.ensemble
    batch_size = experiment.data.global_batch_size
    like = ensemble.abstract_state(built.run.batch(batch_size))
    of_one = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        (like.params, like.model_state),
    )
    base = built.run.to_dict()["shared"]
    for path in paths:
        if (own := base_digest_in(path)) is not None and own != base:
            raise UserError(
                f"{quoted(path)} is a member on shared arrays with the digest {own[:12]}, and the "
                f"config shares {'none' if base is None else f'some with {base[:12]}'}. Give a "
                "config with make_shared(spec) that returns those."
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
    written = write_run(to, SavedMembers(step, built.run.to_dict(), lineages, leaves))
    keep_shared(to, ensemble.shared, is_saved=False)
    return written


def write_network(
    to: Place,
    name: str,
    leaves: Mapping[str, np.ndarray],
    lineage: Lineage,
    step: int,
    base: str | None = None,
) -> None:
    """Writes the network of one member as a safetensors file, whose metadata have its lineage.

    `base` is the digest of the arrays that the member shares with others.
    """
    of_network = [name for name in leaves if name.partition(".")[0] in ROOTS]
    if not of_network:
        raise UserError("The checkpoint has no parameters of networks. Read it by Checkpoints.")
    arrays = {
        _name_of(name): np.ascontiguousarray(leaves[name]).reshape(leaves[name].shape)
        for name in of_network
    }
    metadata = {
        "format": "dist_ens",
        "step": str(step),
        "member_id": str(lineage.member_id),
        "lineage": json.dumps(lineage.to_dict()),
    }
    if base is not None:
        metadata[BASE] = base
    try:
        to.make()
        to.write(name, safetensors.numpy.save(arrays, metadata))
    except Exception as error:  # The Rust part of safetensors raises classes of its own.
        raise RunError(
            f"{quoted(f'{to}/{name}')} could not be written: {first_line(error)}",
            exit_code=code_of_write(error),
        ) from error


def network_paths(given: Sequence[str]) -> list[pathlib.Path]:
    """Returns the paths of networks, in the order of their members."""
    found: list[pathlib.Path] = []
    for text in given:
        path = given_path(text, "FILE")
        if path.is_dir() and not is_orbax(path):
            inside = [each for each in path.iterdir() if each.suffix in SUFFIXES or is_orbax(each)]
        elif path.exists():
            inside = [path]
        else:
            inside = [pathlib.Path(each) for each in glob.glob(str(path))]
        if not inside:
            raise UserError(
                f"There is no network in {shortened(text)}. Give files ({', '.join(SUFFIXES)})."
            )
        found += sorted(inside, key=_in_order)
    return found


def _name_of(leaf: str) -> str:
    """Returns the name of a leaf of a state in a file of one network."""
    root, _, name = leaf.partition(".")
    return name or root


def _in_order(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns a key by which net_2 comes before net_10."""
    parts = re.split(r"(\d+)", os.fspath(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
