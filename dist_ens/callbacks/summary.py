"""The fields of `summary.json` that every run has."""

from collections.abc import Sequence

from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import FailedMember
from dist_ens.evaluation import Scores
from dist_ens.ground.json_text import JsonDict


def summary_of(
    ensemble: Ensemble, step: int, scores: Scores, failed_members: Sequence[FailedMember]
) -> JsonDict:
    """Returns the summary of a run that was scored at a step, without experiment and pace."""
    layout = ensemble.layout
    return {
        "network": ensemble.member.name,
        "steps": step,
        "num_members": layout.num_members,
        **({} if ensemble.heads is None else {"heads": ensemble.heads}),
        "mesh": dict(layout.mesh.shape),
        "execution": ensemble.execution,
        "waves": ensemble.waves,
        "failures": {
            "policy": ensemble.failure_policy.policy,
            "members": [member._asdict() for member in failed_members],
        },
        **scores_to_dict(scores),
    }


def scores_to_dict(scores: Scores) -> JsonDict:
    """Returns the fields of a summary that scores have."""
    return {
        "groups": len(scores.groups),
        "left_out_members": list(scores.left_out),
        **scores.to_dict(),
        "mean_member": scores.mean_member,
    }
