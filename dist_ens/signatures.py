"""Names of functions, and how they can be called; see `dist_ens.errors`."""

from dist_ens.errors import call_error, name_of

__all__ = ["call_error", "name_of"]
