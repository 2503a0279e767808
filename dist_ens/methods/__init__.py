"""How members are trained apart or together: small things that combine."""

from dist_ens.methods.examples import Order

__all__ = ["Order"]
