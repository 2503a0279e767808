"""Optional packages, which an extra of this package installs."""

import importlib
from types import ModuleType

from dist_ens.ground.errors import UserError


def imported(module: str, extra: str) -> ModuleType:
    """Returns a module of an optional package; a `UserError` that names the extra if it is absent.

    >>> imported("no_such_package", "loggers")
    Traceback (most recent call last):
    ...
    dist_ens.ground.errors.UserError: no_such_package is not installed. Install it with pip \
install 'dist-ens[loggers]'.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise UserError(
            f"{error.name} is not installed. Install it with pip install 'dist-ens[{extra}]'."
        ) from error
