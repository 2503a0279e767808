"""The services that let a run be watched and stopped from outside."""

from dist_ens.callbacks import RunInfo, StepInfo
from dist_ens.callbacks.protocol import Service
from dist_ens.ensemble import Ensemble
from dist_ens.layout import holdings
from dist_ens.processes import progress
from dist_ens.processes.peers import Peers
from dist_ens.training.runner import Runner


class Progress(Service):
    """The service that shows the watchdog and the other processes that the run goes on."""

    def begin(self, run: RunInfo) -> None:
        """Tells the other processes what this one holds."""
        hold(run.ensemble)

    def before(self, info: StepInfo) -> None:
        """Notes that a call was dispatched."""
        progress.made()


class Signals(Service):
    """The service that stops a run at a signal, at the same step on every host."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    def before(self, info: StepInfo) -> None:
        """Stops the run if a signal asks for it. Every host must ask equally often."""
        if self._run.stop.is_set() and not info.is_last:
            self._run.interrupt()


def hold(ensemble: Ensemble) -> None:
    """Tells the other processes of a run which part of it each process holds."""
    if Peers.current is not None:
        Peers.current.hold(holdings(ensemble.layout))
