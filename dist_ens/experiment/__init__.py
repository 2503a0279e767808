"""Runs from configs: building, training, loading and assessing them."""

from dist_ens.experiment.loaded import LoadedRun, load
from dist_ens.experiment.workdir import Finished, open_finished, saved_run

__all__ = ["Finished", "LoadedRun", "load", "open_finished", "saved_run"]
