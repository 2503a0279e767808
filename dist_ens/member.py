"""Old name of `dist_ens.members`. It will be removed in version 0.2."""

import warnings

from dist_ens.members import *  # noqa: F403
from dist_ens.members import __all__  # noqa: F401

warnings.warn(
    "dist_ens.member is now called dist_ens.members. Import from there; the old name will be "
    "removed in version 0.2.",
    DeprecationWarning,
    stacklevel=2,
)
