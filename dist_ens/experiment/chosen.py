"""The members of a run that were chosen for its predictions, and are kept in its folder."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dist_ens.checkpoint import state_digest
from dist_ens.evaluation.selection import Choice, choose, required_validation
from dist_ens.report import keep_answers, read_answers
from dist_ens.report.facts import listed_weights
from dist_ens.report.files import CHOICE
from dist_ens.storage import Place, place_of

if TYPE_CHECKING:
    from dist_ens.experiment.loaded_run import LoadedRun


@dataclasses.dataclass(frozen=True)
class KeptChoice:
    """The choice of members with which a run predicts.

    Attributes:
        member_ids: Ids of the chosen members. Empty for all members, with equal weights.
        weights: Weight of each chosen member, with sum 1.
        note: Sentence about the choice, or about a choice of another step. Empty without.
    """

    member_ids: tuple[int | str, ...] = ()
    weights: tuple[float, ...] = ()
    note: str = ""

    def weights_of(self, member_ids: np.ndarray) -> np.ndarray | None:
        """Returns the weights of all members, float64[members]; None without a choice."""
        if not self.member_ids:
            return None
        of_chosen = dict(zip(self.member_ids, self.weights, strict=True))
        return np.array([of_chosen.get(each, 0.0) for each in member_ids.tolist()])


def kept_choice(workdir: Place, step: int) -> KeptChoice:
    """Returns the choice that a run keeps for the members of a step."""
    kept = read_answers(workdir)
    steps = [int(key) for key, entry in kept.items() if entry["answers"].get(CHOICE)]
    if step not in steps or kept[str(step)]["state"] != state_digest(workdir, step):
        if not steps:
            return KeptChoice()
        of = "other members" if step in steps else f"step {max(steps):,}"
        return KeptChoice(
            note=f"All members of step {step:,} are used, because the choice of members is one of "
            f"{of}. Choose again with dist-ens members RUN choose."
        )
    found = kept[str(step)]["answers"][CHOICE]
    listed = listed_weights(found["member_ids"], found["weights"])
    return KeptChoice(
        tuple(found["member_ids"]),
        tuple(found["weights"]),
        f"The ensemble is the chosen members, with weights: {listed}.",
    )


def choose_members(
    opened: "LoadedRun", *, size: int, metric: str, method: str, is_newest: bool
) -> Choice:
    """Chooses members on the validation split of a run, and keeps the choice in its folder."""
    split = required_validation(opened.open_source())
    evaluator = opened._replace(choice=KeptChoice()).evaluator()
    found = choose(evaluator, opened.state, split, size=size, metric=metric, method=method)
    positions, ids = np.flatnonzero(found.weights), opened.ensemble.predictor_ids(opened.state)
    choice = {
        "member_ids": ids[positions].tolist(),
        "weights": found.weights[positions].tolist(),
        "path": list(found.path),
        "metric": metric,
        "method": method,
    }
    _keep(opened, choice, is_newest=is_newest)
    return found


def choose_all(opened: "LoadedRun", *, is_newest: bool) -> None:
    """Makes all members of a run predict again, with equal weights."""
    _keep(opened, {}, is_newest=is_newest)


def _keep(opened: "LoadedRun", choice: dict[str, object], *, is_newest: bool) -> None:
    workdir = place_of(opened.folder, "folder")
    digest = state_digest(workdir, opened.step)
    keep_answers(workdir, opened.step, digest, {CHOICE: choice}, is_newest=is_newest)
