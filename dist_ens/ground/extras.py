"""Optional packages, which the extras of dist-ens install."""

import importlib
from types import ModuleType

from dist_ens.ground.errors import UserError


def imported(module: str, extra: str) -> ModuleType:
    """Returns a module of an optional package.

    Raises a `UserError` that names the extra if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"The package {module.partition('.')[0]} is not installed. Install it with "
            f"pip install 'dist-ens[{extra}]'."
        ) from error
