"""Checks of the environment variables of JAX and XLA, which would end the process if wrong."""

import os
import re
import tempfile

from dist_ens.errors import UserError
from dist_ens.paths import shortened
from launch import ends

_XLA_FLAGS = "XLA_FLAGS"
# Errors in the log of XLA, which also lists its flags.
_LOGGED = re.compile(r"^[EF]\d{4} [^\]]*\] (.*)$", re.MULTILINE)


def import_jax() -> None:
    """Imports JAX, or ends the process if an environment variable has a wrong value."""
    try:
        import jax  # noqa: F401
    except ValueError as error:  # JAX reads its variables while it is imported.
        names = ", ".join(sorted(name for name in os.environ if name.startswith("JAX_")))
        ends.fail(
            2,
            f"error: JAX cannot read one of the variables {names}: {error}. Correct its value, or "
            "unset it.",
        )


def check_xla_flags() -> None:
    """Raises a `UserError` if XLA would end the process because of its flags.

    XLA reads its flags once in a process, and aborts at a wrong one. So a child process reads them
    first, which takes 20 ms. Nothing is checked if `XLA_FLAGS` is not set, or without `fork`.
    """
    text = os.environ.get(_XLA_FLAGS)
    if not text or not hasattr(os, "fork"):
        return
    from jaxlib import xla_client

    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if not child:
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                _ = xla_client.CompileOptions().executable_build_options.debug_options
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            log.seek(0)
            why = [*_LOGGED.findall(log.read().decode(errors="replace")), "XLA aborts"][0]
            raise UserError(
                f"{_XLA_FLAGS}={shortened(text)} cannot be used: {why.rstrip('.')}. Correct "
                f"{_XLA_FLAGS}, or unset it."
            )
