"""Certificates and keys from files, checked when a process starts and not at the first handshake.

Owns: what a PEM file must hold, and errors that name the flag. Does not know: gRPC, listeners.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos.secret_files import read_secret

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFlags:
    """What the three files are called where they are given."""

    ca: str
    cert: str
    key: str


CLIENT_FLAGS = TlsFlags(ca="--tls-ca", cert="--tls-cert", key="--tls-key")
_ARGUMENTS = TlsFlags(ca="ca", cert="cert", key="key")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the PEM files of one end are.

    Attributes:
        ca: Certificates that the peer's must descend from. None: a client trusts what the system
            trusts, a server asks for no certificate.
        cert: Own certificate, followed by those between it and the root.
        key: Its private key, without a password.
        flags: For errors.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    flags: TlsFlags = _ARGUMENTS

    def read(self) -> TlsContents:
        """Read and check the files.

        Raises:
            ValueError: One is missing, unreadable or not what it should be, or they do not belong
                together. The message names flag and file and never quotes contents.
        """
        flags = self.flags
        if (self.cert is None) != (self.key is None):
            given, missing = (flags.cert, flags.key) if self.cert else (flags.key, flags.cert)
            raise ValueError(f"{given} needs {missing}: a certificate and its key go together")
        ca, cert, key = self._contents()
        if self.ca is not None and ca is not None:
            _check_certificates(ca, self.ca, flags.ca)
        if self.cert is not None and self.key is not None and cert is not None and key is not None:
            _check_certificates(cert, self.cert, flags.cert)
            _check_pair(self.cert, self.key, key, flags)
            # The check reads them itself, so it says nothing of files that were replaced meanwhile.
            if self._contents() != (ca, cert, key):
                raise _being_replaced(self.cert, self.key, flags)
        return TlsContents(ca=ca, cert=cert, key=key)

    @property
    def paths(self) -> list[Path | str]:
        """Those that were given."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def _contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        flags = self.flags
        return (
            None if self.ca is None else read_secret(self.ca, flags.ca),
            None if self.cert is None else read_secret(self.cert, flags.cert),
            None if self.key is None else read_secret(self.key, flags.key),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContents:
    """What the files hold. The key is not shown."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None

    def __repr__(self) -> str:
        return f"TlsContents(ca={self.ca is not None}, cert={self.cert is not None})"


def _check_certificates(contents: bytes, path: Path | str, flag: str) -> None:
    try:
        # Between certificates there may be names in any language.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=contents.decode("ascii", "ignore")
        )
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"{flag}: {path} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----), or a "
            "damaged one"
        ) from None


def _check_pair(cert: Path | str, key: Path | str, contents: bytes, flags: TlsFlags) -> None:
    if b"ENCRYPTED" in contents:
        raise ValueError(
            f"{flags.key}: the key in {key} is protected by a password, which nobody could enter "
            "at a restart. Store it without one, readable by this process only."
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{flags.key}: the key in {key} is not the one of the certificate in {cert} "
                f"({flags.cert})"
            ) from None
        raise ValueError(
            f"{flags.key}: {key} holds no private key in PEM form that fits {cert} ({flags.cert})"
        ) from None
    except OSError:
        # They were there a moment ago. Whoever reads them again expects no other error than ours.
        raise _being_replaced(cert, key, flags) from None


def _being_replaced(cert: Path | str, key: Path | str, flags: TlsFlags) -> ValueError:
    return ValueError(f"{flags.cert}: {cert} or {key} is just being replaced")
