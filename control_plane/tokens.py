"""Bearer tokens: who a call is from.

Owns: the files of tokens and what is kept of them: keyed hashes, never the tokens. Does not know:
calls beyond their metadata.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from control_plane.errors import UnauthenticatedError
from protos.secret_files import read_secret

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

logger = logging.getLogger(__name__)

_HEADER = "authorization"
_SCHEME = "bearer"
_PRINCIPAL = re.compile(r"[A-Za-z0-9._@-]{1,128}")
# What a header can carry, and nothing that ends a field of the file.
_TOKEN = re.compile(r"[!-~]{16,1024}")


class _HashedTokens:
    """Token to principal.

    Looked up by a hash under a key that nobody else has: how long that takes depends on a value
    that a caller can neither choose nor predict, so it tells nothing about any token.
    """

    def __init__(self, entries: Iterable[tuple[str, str]]) -> None:
        self._key = secrets.token_bytes(32)
        self._principals = {self._hash(token): principal for principal, token in entries}

    def __len__(self) -> int:
        return len(self._principals)

    def find(self, token: str) -> str | None:
        """Whose token it is; None: nobody's."""
        return self._principals.get(self._hash(token))

    def _hash(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode("utf-8", "surrogatepass"), hashlib.sha256)


class _TokenFile(ABC):
    """Tokens of one file, and their check."""

    def __init__(self, path: Path, flag: str) -> None:
        self._path = path
        self._flag = flag
        self._tokens = _HashedTokens(self._read())

    @property
    def paths(self) -> list[Path]:
        return [self._path]

    def reread(self) -> None:
        """Take over what the file holds now; a file that is wrong changes nothing and is logged."""
        try:
            self._tokens = _HashedTokens(self._read())
        except ValueError as error:
            logger.error("tokens not read again: message=%s", error)
        else:
            logger.info("tokens read again: file=%s tokens=%d", self._path, len(self._tokens))

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Whose call it is.

        Raises:
            UnauthenticatedError: It brings no token, or one that is not in the file.
        """
        values = [value for key, value in metadata if key.lower() == _HEADER]
        if not values:
            raise UnauthenticatedError(
                "The call brings no token. Send the metadata authorization: Bearer TOKEN.",
                problem="missing",
            )
        value = values[0]
        scheme, _, token = (value if isinstance(value, str) else "").partition(" ")
        if len(values) > 1 or scheme.lower() != _SCHEME:
            raise UnauthenticatedError(
                "The call's authorization is not of the form Bearer TOKEN, given once.",
                problem="malformed",
            )
        principal = self._tokens.find(token.strip())
        if principal is None:
            raise UnauthenticatedError(
                "The call's token is not one of this server's. It may have been replaced; ask "
                "whoever runs the server for a new one.",
                problem="unknown",
            )
        return principal

    def _read(self) -> list[tuple[str, str]]:
        try:
            # Some editors put a mark before the first line.
            text = read_secret(self._path, self._flag).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{self._flag}: {self._path} is not UTF-8") from None
        entries: list[tuple[str, str]] = []
        lines: dict[str, int] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            principal, token = self._parse(fields, f"{self._flag}: {self._path} line {number}")
            if token in lines:
                raise ValueError(
                    f"{self._flag}: {self._path} lines {lines[token]} and {number} have the same "
                    "token"
                )
            lines[token] = number
            entries.append((principal, token))
        if not entries:
            raise ValueError(f"{self._flag}: {self._path} holds no token, so nobody could call")
        return entries

    @abstractmethod
    def _parse(self, fields: list[str], where: str) -> tuple[str, str]:
        """Principal and token of a line's words; raises ValueError that begins with `where`."""

    @staticmethod
    def _check_token(token: str, where: str) -> str:
        # Messages count characters and never show them: they end up in logs.
        if not _TOKEN.fullmatch(token):
            raise ValueError(
                f"{where}: a token has 16 to 1024 visible ASCII characters, this one has "
                f"{len(token)}. Make one with: openssl rand -hex 32"
            )
        return token


class ClientTokens(_TokenFile):
    """Who may call the public port. Several tokens of one principal let it replace them."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ValueError: It cannot be used; the message names flag, file and line.
        """
        super().__init__(path, "--auth-tokens-file")

    def _parse(self, fields: list[str], where: str) -> tuple[str, str]:
        if len(fields) != 2:
            raise ValueError(f"{where}: expected PRINCIPAL TOKEN, found {len(fields)} words")
        principal, token = fields
        if not _PRINCIPAL.fullmatch(principal):
            raise ValueError(f"{where}: a principal is 1 to 128 of A-Z a-z 0-9 . _ @ -")
        return principal, self._check_token(token, where)


class WorkerTokens(_TokenFile):
    """Who may attach to the worker port. Several tokens let them be replaced one after another."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ValueError: It cannot be used; the message names flag, file and line.
        """
        super().__init__(path, "--worker-token-file")

    def _parse(self, fields: list[str], where: str) -> tuple[str, str]:
        if len(fields) != 1:
            raise ValueError(f"{where}: expected a token, found {len(fields)} words")
        return "worker", self._check_token(fields[0], where)
