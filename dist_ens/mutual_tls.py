"""Mutual TLS for the meeting of the processes, by the certificates that JAX's own service uses."""

import dataclasses
import ssl
from collections.abc import Mapping
from typing import Any

from dist_ens.errors import UserError

# JAX reads these too. The first three belong together.
_CERT, _KEY, _CA = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
_SINCE = (0, 11, 2)


@dataclasses.dataclass(frozen=True)
class MutualTls:
    """Certificates by which the processes of a run recognise each other.

    Attributes:
        cert_file: File of this process's certificate chain, in PEM.
        key_file: File of its private key, in PEM.
        ca_file: File of the certificates that sign those of all processes, in PEM.
        peer_uri_prefix: Start of a URI that the other's certificate must name, such as
            `spiffe://example.org/`. None: the certificate of process 0 must name its host.
    """

    cert_file: str
    key_file: str
    ca_file: str
    peer_uri_prefix: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], jax_version: str) -> "MutualTls | None":
        """Returns the certificates that the variables of JAX name; None if there are none.

        Args:
            environ: Environment variables.
            jax_version: Version of JAX, such as `0.12.0`.

        Raises:
            UserError: If some but not all variables are set, or this version of JAX ignores them.
        """
        files = {name: environ.get(name, "") for name in (_CERT, _KEY, _CA)}
        missing = [name for name, file in files.items() if not file]
        if len(missing) == len(files):
            return None
        if missing:
            raise UserError(
                f"Mutual TLS lacks {' and '.join(missing)}. Set {_CERT}, {_KEY} and {_CA}, or none "
                "of them."
            )
        known = tuple(int(part) for part in jax_version.split(".")[:3] if part.isdecimal())
        if known < _SINCE:
            raise UserError(
                f"{_CERT} asks for mutual TLS, and JAX {jax_version} does not know it. Install JAX "
                f"{'.'.join(map(str, _SINCE))} or newer, or unset the variable."
            )
        return cls(files[_CERT], files[_KEY], files[_CA], environ.get(_PREFIX) or None)

    def context(self, *, of_server: bool) -> ssl.SSLContext:
        """Returns the settings of a connection that accepts only a certificate of `ca_file`.

        Args:
            of_server: Whether this process is the one that listens.

        Raises:
            UserError: If a file cannot be read, or does not fit the others.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if of_server else ssl.PROTOCOL_TLS_CLIENT)
        if of_server or self.peer_uri_prefix:
            context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.ca_file)
            context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # An `SSLError` is one too.
            raise UserError(
                f"The certificates of mutual TLS cannot be used: {error.strerror or error}. "
                f"Correct {_CERT}={self.cert_file}, {_KEY}={self.key_file} or {_CA}={self.ca_file}."
            ) from error
        return context

    def check_peer(self, connection: ssl.SSLSocket) -> None:
        """Checks the URI in the certificate of the other process, if one is asked for.

        Args:
            connection: Connection whose handshake is done.

        Raises:
            ssl.SSLError: If no URI in the certificate starts with `peer_uri_prefix`.
        """
        if self.peer_uri_prefix is None:
            return
        certificate: dict[str, Any] = connection.getpeercert() or {}
        names = certificate.get("subjectAltName", ())
        if not any(kind == "URI" and name.startswith(self.peer_uri_prefix) for kind, name in names):
            raise ssl.SSLCertVerificationError(
                1, f"no URI in the certificate starts with {self.peer_uri_prefix}"
            )
