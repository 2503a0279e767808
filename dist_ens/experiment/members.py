"""New runs made of members of saved runs: copies of some of them, or more of them."""

import dataclasses
import itertools
from collections.abc import Sequence

from dist_ens.checkpoint import (
    SavedMembers,
    StepRecord,
    ids_text,
    read_lineages,
    read_members,
    require_config_record,
    require_new_folder,
    write_members,
)
from dist_ens.checkpoint.network_files import SHARED, copy_shared
from dist_ens.checkpoint.run_digests import DIGESTS
from dist_ens.ensemble.checks import check_ids_of_groups
from dist_ens.experiment.config_file import EXPERIMENT, NO_FILE, ConfigFile, store_experiment
from dist_ens.experiment.loaded import described_ensemble, parts_of
from dist_ens.experiment.record import Run, differences_on_resume
from dist_ens.experiment.schema import HyperConfig
from dist_ens.experiment.train import train
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_writing import UNFINISHED
from dist_ens.ground.json_text import JsonDict
from dist_ens.storage import Folder, Place, place_of

# Folder of the run that trains more members, in the folder of the new run.
NEW_MEMBERS = "new_members"


def copy_members(
    folders: Sequence[Folder],
    to: Folder,
    *,
    member_ids: Sequence[int] | None = None,
    step: int | None = None,
) -> SavedMembers:
    """Writes a new run that has members of saved runs, and returns them.

    The runs may differ in their seed and their members. A member whose id is taken gets the next
    free id, in an ensemble of groups one of the same group. Only the members' bytes are read.
    """
    to, workdirs = place_of(to, "to"), [place_of(folder, "folder") for folder in folders]
    require_folder(to)
    (first, ids), *others = _ids_in(workdirs, member_ids, step)

    def read(workdir: Place, ids: Sequence[int] | None) -> SavedMembers:
        return read_members(workdir, step, ids).after(f"copied from {workdir.address}")

    members = read(first, ids)
    for workdir, ids in others:
        more = read(workdir, ids)
        if conflict := _conflict(members, more):
            both = f"Members of {quoted(first)} and {quoted(workdir)}"
            raise UserError(f"{both} cannot be in one run: {conflict}.")
        record = _checking_as(members.record, more.record)
        members = members.joined(more.renamed(_free_ids(members, more)))
        members = dataclasses.replace(members, record=record)
    return write_run(to, members, of=first)


def extend(
    folder: Folder,
    member_ids: Sequence[int],
    to: Folder,
    config: ConfigFile | None = None,
) -> SavedMembers | None:
    """Trains more members for a run, and writes a new run that has all of them.

    The new members are those that a larger ensemble would have. They are trained in the folder
    `new_members` of the new run, which can be resumed: the result is None after a signal. The
    members of the run keep every bit. The callbacks of the config file are not called.
    """
    workdir, to = place_of(folder, "folder"), place_of(to, "to")
    require_folder(to, may_hold=[NEW_MEMBERS])
    members = read_members(workdir)
    require_config_record(members.record, workdir)
    if {*member_ids} & {*members.member_ids} or not member_ids:
        raise UserError(f"It has {ids_text(members.member_ids)}. Give ids that it does not have.")
    run = Run.from_dict(members.record)
    run.require_own_keys(workdir)
    file = config or NO_FILE
    parts, source = parts_of(run, workdir, file), file.open_source(run.experiment.data)
    run.require_trained_on(source)
    described_ensemble(run, parts, str(workdir), None)  # It raises for another base, for example.
    experiment = dataclasses.replace(
        run.experiment.with_members(member_ids),
        steps=members.step,
        epochs=None,
        execution=run.execution or run.experiment.execution,
        layout=dataclasses.replace(run.experiment.layout, ensemble_axis=None),
    )
    trained = train(
        experiment,
        to / NEW_MEMBERS,
        parts=dataclasses.replace(parts, callbacks=()),  # They may end training before that step.
        member_file=run.member_file,
        source=source,
    )
    if trained.signal is not None:
        return None
    new = read_members(to / NEW_MEMBERS, members.step)
    return write_run(to, members.joined(new), of=workdir)


def _ids_in(
    workdirs: Sequence[Place], member_ids: Sequence[int] | None, step: int | None
) -> list[tuple[Place, list[int] | None]]:
    """Returns the runs that have some of the asked members, each with the ids of its own."""
    if member_ids is None:
        return [(workdir, None) for workdir in workdirs]
    there = {
        workdir: [each.member_id for each in read_lineages(workdir, step)[1]]
        for workdir in workdirs
    }
    missing = {*member_ids}.difference(*there.values())
    if missing or not member_ids:
        has = "; ".join(f"{quoted(workdir)} has {ids_text(ids)}" for workdir, ids in there.items())
        asked = str(list(member_ids))[:200]
        raise UserError(f"The members {asked} are not all there: {has}. Give ids that are there.")
    found = [
        (workdir, [each for each in member_ids if each in ids]) for workdir, ids in there.items()
    ]
    return [(workdir, ids) for workdir, ids in found if ids]


def _conflict(members: SavedMembers, other: SavedMembers) -> str:
    """Returns in what two runs differ apart from seed and members, or share; empty for nothing."""
    if members.step != other.step:
        return f"the first has seen {members.step:,} steps, and the second {other.step:,}"
    different = _differences(members.record, other.record)
    if different:
        return "; ".join(
            f"{what} is {repr(one)[:200]} in the first and {repr(two)[:200]} in the second"
            for what, one, two in different
        )
    first, second = (
        {(member.seed, member.original_id) for member in each.lineages if member.seed is not None}
        for each in (members, other)
    )
    if not first & second:
        return ""
    seed, member_id = min(first & second)
    return f"member {member_id} of the seed {seed} is in both"


def _differences(record: JsonDict, other: JsonDict) -> list[tuple[str, object, object]]:
    """Returns the differences between two runs apart from seeds and members, with both values."""
    is_of_config, other_is = ("experiment" in each for each in (record, other))
    if is_of_config != other_is:
        return [("the run of a config", is_of_config, other_is)]
    records = [StepRecord.from_dict(each).with_members([0]) for each in (record, other)]
    names, more = (sorted(each.hyper or {}) for each in records)
    if names != more:
        return [("the names in hyper", names, more)]
    # Values of settings are those of the members, which keep them.
    one, two = (dataclasses.replace(each, seed=0, hyper=None) for each in records)
    different = two.differences(one)
    if is_of_config:
        runs = [Run.from_dict(each).experiment for each in (record, other)]
        first, second = (
            dataclasses.replace(each, seed=0, hyper=HyperConfig()).with_members((0,))
            for each in runs
        )
        different = differences_on_resume(first, second) or different
    return different


def _checking_as(record: JsonDict, other: JsonDict) -> JsonDict:
    """Returns the record of a run, with the failure policy of another if only that has one."""
    if "experiment" not in record:  # A run of Python, whose ensemble has the policy.
        return record
    run, failures = Run.from_dict(record), Run.from_dict(other).experiment.failures
    if run.experiment.failures.is_checked or not failures.is_checked:
        return record
    experiment = dataclasses.replace(run.experiment, failures=failures)
    return dataclasses.replace(run, experiment=experiment).to_dict()


def _free_ids(members: SavedMembers, other: SavedMembers) -> list[int]:
    """Returns ids for the members of another run: their own, or the next free of their group."""
    record = members.record
    is_of_config = "experiment" in record
    groups = Run.from_dict(record).spec.num_groups if is_of_config else record.get("num_groups")
    used, ids = {*members.member_ids, *other.member_ids}, []
    for member_id in other.member_ids:
        if member_id in members.member_ids:
            ahead = itertools.count(max(members.member_ids) + 1)
            member_id = next(
                n for n in ahead if n not in used and (n - member_id) % (groups or 1) == 0
            )
            used.add(member_id)
        ids.append(member_id)
    return ids


def require_folder(to: Place, *, may_hold: Sequence[str] = ()) -> None:
    """Raises a `UserError` unless `write_run` can write into a folder, perhaps again."""
    own = [EXPERIMENT, f"{EXPERIMENT}.{UNFINISHED}", SHARED, DIGESTS]
    require_new_folder(to, [*own, *may_hold])


def write_run(to: Place, members: SavedMembers, *, of: Place | None = None) -> SavedMembers:
    """Writes a new run with these members, and returns them with its record.

    `of` is a run that may hold arrays that its members share.
    """
    ids = members.member_ids
    hyper = {
        name.removeprefix("hyper."): tuple(values.tolist())
        for name, values in members.leaves.items()
        if name.startswith("hyper.")
    }
    if "experiment" in members.record:
        run = Run.from_dict(members.record).with_members(ids, hyper)
        check_ids_of_groups(ids, run.spec.num_groups)
        members = dataclasses.replace(members, record=run.to_dict())
    else:
        record = StepRecord.from_dict(members.record).with_members(ids, hyper)
        members = dataclasses.replace(members, record=record.to_dict())
        run = None

    def write_experiment() -> None:
        if run is not None and not run.has_own_parts:
            store_experiment(to, run.experiment)
        if of is not None:
            copy_shared(of, to)

    # The checkpoint comes last: a folder without it can take the run again.
    write_members(to, members, before=write_experiment)
    return members
