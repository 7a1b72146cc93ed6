"""What guards the two ports, while the process runs: certificates and tokens, and their renewal.

Files are looked at every few seconds and read again once they have changed and then stayed as they
are, which one that is half written does not; or at once when somebody says so. What is wrong then
changes nothing.

Owns: when files are read again, and what is said about them. Does not know: flags, handshakes,
calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from control_plane.tokens import ClientTokens, WorkerTokens
from protos.secret_files import mode_if_open_to_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from control_plane.security_config import SecurityConfig
    from protos.tls_files import TlsContents, TlsFiles

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class _Source(Protocol):
    @property
    def paths(self) -> Sequence[Path | str]: ...

    def reread(self) -> None: ...


class Certificates:
    """A port's certificate, key and CA. Handshakes after a change see the new ones."""

    def __init__(self, tls: TlsFiles) -> None:
        """Read the files.

        Raises:
            ValueError: One of them cannot be used; the message names its flag.
        """
        self._tls = tls
        contents = tls.read()
        self._lock = threading.Lock()
        self._next: grpc.ServerCertificateConfiguration | None = None
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(contents),
            self._take_next,
            require_client_authentication=contents.ca is not None,
        )

    @property
    def paths(self) -> Sequence[Path | str]:
        return self._tls.paths

    def reread(self) -> None:
        """Take over what the files hold now; files that are wrong change nothing and are logged."""
        try:
            configuration = self._configuration(self._tls.read())
        except ValueError as error:
            logger.error("certificates not read again: message=%s", error)
            return
        with self._lock:
            self._next = configuration
        logger.info("certificates read again: file=%s", self._tls.cert)

    def _configuration(self, contents: TlsContents) -> grpc.ServerCertificateConfiguration:
        if contents.key is None or contents.cert is None:
            raise ValueError(f"{self._tls.flags.cert} is missing: TLS needs a certificate")
        return grpc.ssl_server_certificate_configuration(
            [(contents.key, contents.cert)], root_certificates=contents.ca
        )

    def _take_next(self) -> Any:
        """What gRPC asks before every handshake, on threads of its own; None: nothing new."""
        with self._lock:
            configuration, self._next = self._next, None
        return configuration


class PortSecurity:
    """Certificates and tokens of both ports. One per process, used on one event loop."""

    def __init__(self, config: SecurityConfig) -> None:
        """Read every file.

        Raises:
            ValueError: One of them cannot be used; the message names its flag.
        """
        self._certificates = config.tls and Certificates(config.tls)
        self._worker_certificates = config.worker_tls and Certificates(config.worker_tls)
        self.tokens = config.auth_tokens_file and ClientTokens(config.auth_tokens_file)
        self.worker_tokens = config.worker_token_file and WorkerTokens(config.worker_token_file)
        sources = (
            self._certificates,
            self._worker_certificates,
            self.tokens,
            self.worker_tokens,
        )
        self._watched = [_Watched(source) for source in sources if source is not None]
        self._rereading = asyncio.Lock()
        keys = [tls and tls.key for tls in (config.tls, config.worker_tls)]
        secrets = (config.auth_tokens_file, config.worker_token_file, *keys)
        self._secrets = list(dict.fromkeys(path for path in secrets if path is not None))

    @property
    def credentials(self) -> grpc.ServerCredentials | None:
        """Of the public port; None: plain text."""
        return self._certificates and self._certificates.credentials

    @property
    def worker_credentials(self) -> grpc.ServerCredentials | None:
        """Of the worker port; None: plain text."""
        return self._worker_certificates and self._worker_certificates.credentials

    def warn(self, host: str) -> None:
        """Say what is open to more people than it should be."""
        for path in self._secrets:
            if (mode := mode_if_open_to_all(path)) is not None:
                logger.warning("secret readable for every user: file=%s mode=%s", path, mode)
        if host in _LOOPBACK:
            return
        for tokens, certificates, flag in (
            (self.tokens, self._certificates, "--tls-cert"),
            (self.worker_tokens, self._worker_certificates, "--worker-tls-cert"),
        ):
            if tokens is not None and certificates is None:
                logger.warning("tokens travel in plain text: host=%s missing=%s", host, flag)

    async def reread(self) -> None:
        """Read every file again, at once. What runs already is not asked again."""
        async with self._rereading:
            for watched in self._watched:
                # Not on the loop: a disk, or a file server, may take its time.
                await asyncio.to_thread(watched.reread)

    async def watch(self) -> None:
        """Read again what has changed, without end."""
        while self._watched:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            async with self._rereading:
                for watched in self._watched:
                    await asyncio.to_thread(watched.look)


class _Watched:
    """A source of secrets and the state of its files."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._read = self._seen = self._stamp()

    def look(self) -> None:
        """Read again what has changed and is not being changed any more."""
        stamp = self._stamp()
        if stamp == self._seen and stamp != self._read:
            self.reread()
        self._seen = stamp

    def reread(self) -> None:
        # Before the files are read: whatever happens to them meanwhile is seen next time.
        self._read = self._stamp()
        self._source.reread()

    def _stamp(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._source.paths)


def _stamp(path: Path | str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
