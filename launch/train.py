"""Trains an ensemble: dist-ens train --config=FILE --workdir=DIR [--config.FIELD=VALUE …]."""

from absl import flags

from dist_ens.data import open_source
from dist_ens.train import train
from launch import front
from launch.config_file import ConfigFlags

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; one that holds it goes on.")
_CONFIG = ConfigFlags()


def main() -> int:
    """Trains; 128 + the signal's number if one stopped it."""
    workdir = front.required(_WORKDIR)
    experiment = _CONFIG.experiment()
    source = open_source(experiment.data)
    member = _CONFIG.make_member(source.spec)
    trained = train(
        experiment,
        workdir,
        member=member,
        member_file=_CONFIG.file.path if member and _CONFIG.file else None,
        source=source,
    )
    return 0 if trained.signal is None else 128 + trained.signal


def run() -> None:
    """The whole command."""
    front.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
