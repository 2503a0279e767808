"""Scores a run on its test split: dist-ens evaluate --workdir=DIR [--json=FILE]."""

import pathlib

from absl import flags
from rich.console import Console

from dist_ens import cluster, report
from dist_ens.data import open_source
from dist_ens.errors import UserError
from dist_ens.evaluate import Evaluator
from dist_ens.run import open_finished
from launch import front
from launch.config_file import ConfigFlags

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_JSON = flags.DEFINE_string("json", None, "File to write the scores to.")
_CONFIG = ConfigFlags(overridable=False)


def main() -> None:
    """Scores the newest checkpoint on the devices at hand."""
    workdir = pathlib.Path(front.required(_WORKDIR))
    run, ensemble, state = open_finished(workdir, _CONFIG.make_member)
    source = open_source(run.experiment.data)
    if source.spec != run.spec:
        here, there = source.spec.told_apart(run.spec)
        raise UserError(
            f"A run is scored on data like its training data. Received: {here} from "
            f"{run.experiment.data.source}, where {workdir} was trained on {there}. Put the "
            "data set back that it was trained on."
        )
    evaluator = Evaluator(ensemble, run.experiment.evaluation.global_batch_size, source.spec)
    scores = evaluator.evaluate(state, source.test)
    if not cluster.is_main():
        return
    groups = len(scores.groups)
    Console().print(
        report.scores_table(scores.ensemble, scores.mean_member, scores.members, groups)
    )
    if _JSON.value is not None:
        as_json = {
            "groups": groups,
            **scores.to_dict(),
            "mean_member": scores.mean_member,
        }
        front.write_file(_JSON, lambda path: report.write_scores(path, as_json))


def run() -> None:
    """The whole command."""
    front.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
