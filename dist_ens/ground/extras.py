"""Optional packages, which are imported when they are first used."""

import importlib
from types import ModuleType

from dist_ens.ground.errors import UserError


def imported(module: str, extra: str) -> ModuleType:
    """Returns a module of an optional package.

    Raises:
        UserError: If the package is not installed. The message names the extra that brings it.

    >>> imported("json", "tables").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed. Install it with: pip install 'dist-ens[{extra}]'."
        ) from error
