"""The loggers that a config names."""

import os
import pathlib
from collections.abc import Callable

from dist_ens.callbacks import MLflow, TensorBoard, WandB
from dist_ens.callbacks.logger import Logger
from dist_ens.experiment.reading import leaves
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.storage import Place


def loggers_below(workdir: Place, experiment: Experiment) -> list[Logger]:
    """Returns the loggers that an experiment names, which log below the folder of the run."""
    names = experiment.logging.loggers
    if names and not workdir.is_local:
        raise UserError(
            f"logging.loggers={names} log below the folder of the run, which must be on a "
            f"disk: got {quoted(workdir)}. Leave them out, and return loggers with another folder "
            "from make_callbacks(spec)."
        )
    folder = pathlib.Path(workdir.address)
    made: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "wandb": lambda: WandB(name=workdir.name, folder=folder),
        "mlflow": lambda: MLflow(
            run_name=workdir.name,
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{folder}/mlruns/mlflow.db",
        ),
    }
    loggers = [made[name]() for name in dict.fromkeys(names)]
    for logger in loggers:  # W&B wants no full stop in a name.
        settings = leaves(experiment.to_dict())
        logger.config = {name.replace(".", "/"): value for name, value in settings}
    return loggers
