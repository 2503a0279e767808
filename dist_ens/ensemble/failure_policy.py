"""The policy for members whose update fails."""

import dataclasses

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_coefficient, require_one_of

POLICIES = ("continue", "skip", "freeze", "drop", "raise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """A policy for members whose update fails.

    An update fails if its loss or its gradient is NaN or infinite. With `loss_threshold`, an update
    with an exceptionally large loss fails too. The other members are not affected.
    Only under the policy `continue` is a failed update taken.

    Attributes:
        policy: Response to a failed update.

            - `continue`: checks nothing. The update is taken, as in a plain training loop.
            - `skip`: takes the member's next update. After 100 failed updates in a row the member
              is frozen.
            - `freeze`: takes no more updates of the member.
            - `drop`: freezes the member for good, and stops it as a callback may stop members.
            - `raise`: ends the run with an error.
        loss_threshold: Number of standard deviations by which a loss may exceed the running mean of
            the member's own losses. An update with a larger loss fails. None checks only whether
            the loss is finite.

    Raises:
        UserError: If the policy is unknown, or the threshold is not positive or needs a policy that
            checks updates.

    >>> FailurePolicy(policy="freeze", loss_threshold=20.0).is_checked
    True
    """

    policy: str = "continue"
    loss_threshold: float | None = None

    def __post_init__(self) -> None:
        require_one_of("failure_policy", self.policy, POLICIES)
        if self.loss_threshold is None:
            return
        require_coefficient("loss_threshold", self.loss_threshold, "20 is usual.")
        if not self.is_checked:
            raise UserError(
                f"loss_threshold={self.loss_threshold} needs a policy that checks updates, and "
                "failure_policy='continue' checks none. Choose failure_policy='skip'."
            )

    @classmethod
    def of(cls, given: "FailurePolicy | str | None") -> "FailurePolicy":
        """Returns a policy from a policy, its name, or None for the default."""
        if isinstance(given, FailurePolicy):
            return given
        return cls() if given is None else cls(policy=given)

    @property
    def is_checked(self) -> bool:
        """Whether updates are checked."""
        return self.policy != "continue"
