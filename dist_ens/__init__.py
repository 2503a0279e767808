"""Deep ensembles trained as one JAX program."""

__version__ = "0.1.0"
