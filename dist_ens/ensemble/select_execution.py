"""Selection of an execution, by a rule or by timing the candidates on the program itself.

What was chosen is kept in a cache for later runs of the same program.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence

import jax
from jax.extend.core import ClosedJaxpr

import dist_ens
from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.ensemble.batches import CallBatches, specs_of, steps_in
from dist_ens.ensemble.ensemble import Ensemble
from dist_ens.ensemble.update_steps import batches_of_wave
from dist_ens.execution import autotune
from dist_ens.execution.autotune import REFERENCE
from dist_ens.execution.heuristics import candidates
from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import replace_file
from dist_ens.ground.json_text import JsonDict, from_json
from dist_ens.ground.state import State
from dist_ens.ground.types import PyTree
from dist_ens.layout import Waves, device_bytes
from dist_ens.processes import cluster
from dist_ens.processes.compile_cache import cache_folder
from dist_ens.storage import Place

CHOICES = "executions.json"


@dataclasses.dataclass(frozen=True)
class Choice:
    """An execution, and the reason why it was chosen.

    `option` ends with ` on one device` if it uses only one. Seconds per step, rounds of timing and
    errors are those of each candidate, by its name.
    """

    option: str
    why: str
    step_secs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_turns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        alike: dict[int, list[str]] = {}
        for name, secs in sorted(self.step_secs.items(), key=lambda item: item[1]):
            alike.setdefault(self.num_turns.get(name, 0), []).append(f"{name} {secs * 1e3:.3g}")
        tried = "; ".join(
            (f"median of {count} rounds: " if count else "once: " if len(alike) > 1 else "")
            + ", ".join(alike[count])
            for count in sorted(alike, reverse=True)
        )
        text = f"Execution {self.option}: {self.why}" + (f" ({tried} ms a step)." if tried else ".")
        raised = "; ".join(f"{name} raised {error}" for name, error in self.failed.items())
        return f"{text} Not used: {raised}" if raised else text


def choose(
    ensemble: Ensemble,
    state: State,
    batches: CallBatches | PyTree,
    num_steps: int,
    *,
    workdir: Place | None = None,
    may_move: bool = True,
) -> tuple[Ensemble, Choice]:
    """Returns the ensemble with the fastest execution found within the time budget, and the choice.

    An earlier choice for the same program on the same kind of device is used again, from `workdir`
    or the user's cache. Several hosts time together, and process 0 decides. If the devices are the
    cores of one CPU, the fastest execution is also tried on one device, unless `may_move` is False.
    """
    if ensemble.waves > 1:  # All waves run the same program, so one of them is timed.
        waves = Waves(ensemble.layout, ensemble.waves)
        _, choice = choose(
            ensemble.of_wave,
            waves.take(state, 0),
            batches_of_wave(waves, batches, 0),
            num_steps * ensemble.waves,
            workdir=workdir,
            may_move=False,
        )
        of_all = {name: secs * ensemble.waves for name, secs in choice.step_secs.items()}
        choice = dataclasses.replace(choice, step_secs=of_all)
        return ensemble.on(ensemble.layout, choice.option), choice
    layout, traced = ensemble.layout, ensemble.traced_update(state, batches)
    names = candidates(layout, traced, steps_in(batches))
    options = {name: ensemble.on(layout, name) for name in names}
    if may_move and cluster.cores_are_devices() and layout.mesh.size > 1:
        alone = layout.on_one_device()
        for name in candidates(alone, traced, steps_in(batches)):
            options[f"{name} on one device"] = ensemble.on(alone, name)
    if layout.model_axis > 1:
        why = "members that share devices are taken one after another"
        return options[names[0]], Choice(names[0], why)
    if len(options) == 1:
        return options[names[0]], Choice(names[0], "nothing else is worth trying for this network")
    program = _program(ensemble, traced, [*options], state, batches)
    # If every other execution raises an error, the reference is used.
    known = {REFERENCE: ensemble.on(layout, REFERENCE)} | options
    # A choice for which time was short holds for runs of the same length only: a longer run has
    # more time to try candidates.
    of_this_length = f"{program} {num_steps}"
    call = autotune.Call(state, batches, specs_of(batches), steps_in(batches))
    earlier = _earlier(program, of_this_length, [*known], workdir)
    choice = earlier or _timed(known, names, call, num_steps, program)
    if workdir is not None and cluster.is_main():
        keep_execution(of_this_length, choice.option, workdir)
    return known[choice.option], choice


def _earlier(
    program: str, of_this_length: str, known: Sequence[str], workdir: Place | None
) -> Choice | None:
    """Returns the choice of an earlier run of a program; None if there is none."""
    for kept, why in (
        (kept_execution(of_this_length, workdir) if workdir else None, "as when this run began"),
        (kept_execution(program), "the fastest in an earlier run of this program"),
        (
            kept_execution(of_this_length),
            "taken from the cache of an earlier run with the same number of steps",
        ),
    ):
        position = cluster.as_main_sees(known.index(kept) if kept in known else -1)
        if position >= 0:
            return Choice(known[position], why)
    return None


def _timed(
    known: Mapping[str, Ensemble],
    names: list[str],
    call: autotune.Call,
    num_steps: int,
    program: str,
) -> Choice:
    """Returns the fastest execution of a program, and keeps it in the user's cache."""
    # Timing needs memory for a copy of the state, and for the results of a step.
    free = known[names[0]].layout.free_bytes()
    if not cluster.as_main_sees(free >= 2 * device_bytes(call.state)):
        return Choice(names[0], "the rule, because memory is too small to time candidates")
    timing = autotune.timed(known, names, call, num_steps)
    why = "the fastest of those tried"
    if len(timing.step_secs) == 1 and len(timing.failed) >= len(names) - 1:
        why = "the only one that raised no error"
    elif len(timing.step_secs) == 1:
        is_part = timing.budget_secs < autotune.LONGEST_SECS
        part = f", {autotune.PART_OF_THE_RUN:.0%} of the run" if is_part else ""
        most = f"{timing.budget_secs:.2g} s{part}"
        why = f"the rule, because timing others would take more than {most}, or too much memory"
    if cluster.is_main():
        of_this_length = f"{program} {num_steps}"
        keep_execution(program if timing.settled else of_this_length, timing.fastest)
    return Choice(timing.fastest, why, timing.step_secs, timing.num_turns, timing.failed)


def _program(
    ensemble: Ensemble,
    traced: ClosedJaxpr,
    names: list[str],
    state: State,
    batches: CallBatches | PyTree,
) -> str:
    """Returns a fingerprint of the program, its candidates and the kind of device."""
    device = ensemble.layout.mesh.devices.flat[0]
    parts = (
        re.sub(r"0x[0-9a-f]+", "", str(traced)),  # Addresses differ from run to run.
        [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((state, batches))],
        names,
        str(ensemble.layout),
        device.device_kind,
        cluster.processor() if device.platform == "cpu" else None,
        jax.__version__,
        dist_ens.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def kept_execution(program: str, workdir: Place | None = None) -> str | None:
    """Returns the execution that was chosen before for a program, by its fingerprint, or None."""
    execution = _kept(workdir).get(program)
    return execution if isinstance(execution, str) else None


def keep_execution(program: str, execution: str, workdir: Place | None = None) -> None:
    """Keeps a choice for the next run of the same program, in the user's cache or a run's folder.

    A user without a home folder has no cache.
    """
    cache = cache_folder()
    text = json.dumps(_kept(workdir) | {program: execution}, indent=1)
    try:
        if workdir is not None:
            write_run_file(workdir, CHOICES, text)
        elif cache is not None:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Several runs may write at the same time, so each writes a file of its process.
            replace_file(cache / CHOICES, text, beside=str(os.getpid()))
    except OSError as error:
        logging.warning(
            "Could not write the chosen execution in %s: %s. The next run will time again.",
            workdir or cache,
            error.strerror,
        )


def _kept(workdir: Place | None) -> JsonDict:
    """Returns the choices that are kept; an empty dict if there are none, or they are damaged."""
    cache = cache_folder()
    try:
        if workdir is not None:
            kept = from_json(workdir.read(CHOICES))
        else:
            kept = from_json(bytes_in(cache / CHOICES)) if cache else {}
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
