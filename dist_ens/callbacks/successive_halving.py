"""Successive halving: the worst members stop, again and again."""

import math
from collections.abc import Sequence

from dist_ens.callbacks.protocol import RunInfo, StopMembers, direction_of, stop_members
from dist_ens.evaluation import Scores
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.numbers import require_fraction, require_one_of, whole_number
from dist_ens.ground.predictors import member_of, scores_by_member


class SuccessiveHalving:
    """A callback that stops the worst members of a sweep every few steps.

    After every `every` steps, the `keep` best of the members that are still trained go on, at least
    `least` of them. The others keep their parameters, and take no more updates.

    Args:
        metric: Name of the members' score, such as "nll".
        keep: Share of the members that go on, in [0, 1). With 0, `least` members go on.
        every: Number of steps between two choices. Evaluations must happen there, so it is a
            multiple of `eval_every`.
        least: Number of members that are trained to the end.
        direction: Whether a "lower" or a "higher" score is better. Default: the metric's own.

    Raises:
        UserError: If an argument is out of range; when the run begins, if the score is unknown or
            is not there after `every` steps; after these, if no member has it.

    >>> from types import SimpleNamespace
    >>> halving = SuccessiveHalving("nll", every=100, direction="lower")
    >>> scores = [{"member_id": 0, "nll": 0.3}, {"member_id": 1, "nll": 0.2}]
    >>> halving.evaluated(100, SimpleNamespace(members=scores, left_out=[]))
    StopMembers(member_ids=(0,))

    Source: Jamieson and Talwalkar (2016), https://arxiv.org/abs/1502.07943.
    """

    stops_members = True

    def __init__(
        self,
        metric: str = "nll",
        *,
        keep: float = 0.5,
        every: int,
        least: int = 1,
        direction: str | None = None,
    ) -> None:
        require_fraction("keep", keep, "0.5 halves them.")
        if direction is not None:
            require_one_of("direction", direction, ("lower", "higher"))
        self.metric, self.keep, self.direction = metric, keep, direction
        # Not `every`, which is the attribute of callbacks that are called every few steps.
        self.every_steps = whole_number("every", every, least=1)
        self.least = whole_number("least", least, least=1)
        self._direction = direction
        self._stopped: set[int] = set()
        self._previous_step = 0
        self._is_restored = False

    def begin(self, run: RunInfo) -> None:
        """Checks that the score is there when members are chosen."""
        self._stopped = set()
        if not self._is_restored:
            self._previous_step = run.first_step
        self._is_restored = False
        self._direction = direction_of(self, run)
        if run.eval_every is None or self.every_steps % run.eval_every:
            raise UserError(
                f"SuccessiveHalving chooses every {self.every_steps} steps, and fit evaluates "
                f"every {run.eval_every} steps. Make every a multiple of eval_every."
            )

    def members_stopped(self, member_ids: Sequence[int]) -> None:
        """Notes which members have stopped, for whatever reason."""
        self._stopped = {*member_ids}

    def evaluated(self, step: int, scores: Scores) -> StopMembers | None:
        """Stops the worst members, if it is time."""
        is_time = step // self.every_steps > self._previous_step // self.every_steps
        self._previous_step = step
        if not is_time:
            return None
        sign = -1.0 if self._direction == "higher" else 1.0
        # Those that have failed are left out.
        gone = {*self._stopped, *map(member_of, scores.left_out)}
        of_members = scores_by_member(scores.members, self.metric).items()
        values = {each: sign * score for each, score in of_members if each not in gone}
        if values and all(map(math.isnan, values.values())):
            raise UserError(
                f"SuccessiveHalving compares members by {self.metric!r}, which is NaN for each of "
                f"the {len(values)} that are left at step {step:,}. Choose a score that members "
                "have, such as 'nll', or lower the learning rates."
            )
        order = sorted(values, key=lambda each: (math.isnan(values[each]), values[each]))
        worst = order[max(self.least, math.ceil(self.keep * len(order))) :]
        return stop_members(sorted(worst)) if worst else None

    def state(self) -> JsonDict:
        """Returns the step of the last evaluation, after which members may be chosen again."""
        return {"step": self._previous_step}

    def restore(self, state: JsonDict) -> None:
        """Restores a state that `state` returned."""
        self._previous_step, self._is_restored = state["step"], True
