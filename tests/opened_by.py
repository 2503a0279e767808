"""Trains, evaluates and reports a run, and prints who else than the storage room opened its files.

python tests/opened_by.py WORKDIR
"""

import os
import pathlib
import sys
import traceback

EVENTS = {
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"),
    *("os.link", "os.symlink", "os.truncate", "os.chmod", "shutil.rmtree", "tempfile.mkstemp"),
}


def main(workdir):
    seen = set()

    def audit(event, args):
        if event not in EVENTS or not args or not isinstance(args[0], str | os.PathLike):
            return
        if os.path.abspath(os.fspath(args[0])).startswith(workdir):
            files = [frame.filename for frame in traceback.extract_stack(limit=60)]
            ours = [pathlib.Path(file) for file in files if "/dist_ens/" in file]
            by_storage = any(path.parent.name == "storage" for path in ours)
            seen.add("storage" if by_storage else f"{event} {args[0]} by {ours[-1:]}")

    from dist_ens import report
    from dist_ens.experiment import Experiment, open_source
    from dist_ens.experiment.assessment import EvaluationRequest, assess
    from dist_ens.experiment.loaded import open_finished
    from dist_ens.experiment.loaded_run import keep
    from dist_ens.experiment.members import copy_members
    from dist_ens.experiment.train import train
    from dist_ens.storage import place_of

    sys.addaudithook(audit)
    place = place_of(workdir, "workdir")
    parts = {"data": {"global_batch_size": 8}, "model": {"name": "mlp", "hidden_sizes": (4,)}}
    for steps in (4, 8):
        saved = {"every_steps": 2, "keep": 1}
        values = {"num_members": 2, "steps": steps, "checkpoint": saved, "execution": "auto"}
        train(Experiment.from_dict({**values, **parts}), workdir)
    opened = open_finished(workdir)
    source = open_source(opened.config_run.experiment.data)
    found = assess(opened.config_run, opened.evaluator(), opened.state, source, EvaluationRequest())
    keep(place, opened.step, {report.SCORES: found.scores_to_dict()})
    report.write_report(place, found.to_dict(), found.curves, found.pictures)
    report.read_run(workdir)
    copy_members([workdir], f"{workdir}/copy", member_ids=[1])
    print("\n".join(sorted(seen)))


if __name__ == "__main__":
    main(*sys.argv[1:])
