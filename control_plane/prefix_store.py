"""Where hash metadata of the prefix index outlives the process: one interface, two implementations.

Owns: the interface, the form of an entry, the reading of store URLs, the factory. Does not know:
tokens (none is ever stored), blocks' reference counts, workers.

The store is a lagging copy. Losing any part of it costs prefix hits, never a wrong token: an entry
is adopted only if every rank still reports the entry's generation for that block.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from control_plane.request import BlockHash, BlockId, Version

HASH_BYTES = 32
# More replicas than one control plane has.
MAX_SCOPES = 1024
_ENTRY_FORMAT = 2
# Format byte, block hash, generation, the same on every machine; a checksum follows.
_ENTRY = struct.Struct("<B32sq")
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Whose blocks the entries describe. Entries of two scopes never meet.

    Attributes:
        deployment: Name of the installation; several may share one server.
        model_fingerprint: 32 bytes, KV dtype included.
        replica_epoch: 32 bytes, new whenever any rank allocates its KV memory.
    """

    deployment: str
    model_fingerprint: bytes
    replica_epoch: bytes

    @property
    def key(self) -> str:
        """Printable and without ambiguity, whatever the deployment is called."""
        return (
            f"{quote(self.deployment, safe='')}:"
            f"{self.model_fingerprint.hex()}:{self.replica_epoch.hex()}"
        )


class PrefixStore(Protocol):
    """Block id -> (block hash, generation), per scope, and the counter of terms.

    Every method is called from one event loop. None of them raises because the store is gone.
    """

    async def start(self) -> None:
        """Begin to work. Succeeds, without waiting, whether the store answers or not."""
        ...

    async def close(self) -> None:
        """Write what can be written in a moment, then let go."""
        ...

    def record(
        self, scope: PrefixScope, changes: Mapping[BlockId, tuple[BlockHash, Version] | None]
    ) -> None:
        """Take over changes of confirmed entries; None: the block has no hash any more.

        Returns at once. Only the newest value per block is kept until it is written.
        """
        ...

    def renew(
        self,
        scope: PrefixScope,
        live: Callable[[], Mapping[BlockId, tuple[BlockHash, Version]]],
    ) -> None:
        """The replica's lease came in: its entries live on.

        Cheap enough for every message of a worker.

        Args:
            scope: The replica's.
            live: Gives all confirmed entries. Called later, and only if the store may have lost
                some: on the first lease, after an expiry, a wipe or a reconnection.
        """
        ...

    def retire(self, scope: PrefixScope) -> None:
        """The replica's KV memory is gone for good: its entries go, and nobody hears of it again.

        Returns at once. What the store does not take is tried again, for as long as the entries
        would have lived; changes that come in from now on are those of a scope that begins anew.
        Only for what is known to be gone: who merely lost a connection brings its memory back.
        """
        ...

    async def load(self, scope: PrefixScope) -> dict[BlockId, tuple[BlockHash, Version]] | None:
        """Read the entries of a replica; None if the store does not answer within its limit.

        Values that do not read as entries are left out.
        """
        ...

    async def known_scopes(
        self,
        deployment: str,
        model_fingerprints: Collection[bytes],
        *,
        within_s: float = math.inf,
    ) -> list[PrefixScope] | None:
        """Which replicas of these models have entries; None if the store does not answer in time.

        Those of this shard only, `MAX_SCOPES` at most. It is a lagging copy too: replicas that are
        gone and were not retired stay for their TTL.

        Args:
            deployment: Whose replicas.
            model_fingerprints: Of the models.
            within_s: Leave out replicas whose last lease came at least so much longer ago than the
                newest of all: whoever wrote that had lost them.
        """
        ...

    async def next_term(self, shard: str, at_least: int) -> int:
        """Give max(stored counter, at_least) + 1 and store it, now or when the store is back."""
        ...

    def describe(self) -> str:
        """Give the state for people: "memory", "redis: ok", "redis: unreachable since ..."."""
        ...


class StoreObserver:
    """Hooks for metrics. This one ignores everything; subclass it and override."""

    def on_state(self, *, available: bool) -> None:
        """The store began or ceased to take writes."""

    def on_written(self, num_entries: int) -> None:
        """So many entries were set or removed in the store."""

    def on_failure(self, kind: str) -> None:
        """An operation failed; `kind` is "unreachable", "full", "read-only", "denied", ..."""

    def on_resync(self, num_entries: int) -> None:
        """All live entries of a scope are written again."""

    def on_loaded(self, num_entries: int, num_invalid: int) -> None:
        """A scope was read; `num_invalid` values were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTiming:
    """How patient the store is. All in seconds.

    Attributes:
        ttl_s: Life of a scope without a lease. Correctness does not depend on it (the epoch is in
            the key); it must outlast a restart of the control plane and only bounds garbage.
        op_timeout_s: Limit of one exchange with the server, connecting included.
        load_timeout_s: Limit of a whole `load`, for which no request waits longer than its own
            limit.
        coalesce_s: How long changes gather before they are written.
        renew_interval_s: Leases that come in faster than this share one renewal.
        probe_interval_s: How often an idle connection is tried, so that `describe` stays true.
        backoff_min_s: First pause after a failure; doubles up to `backoff_max_s`.
        backoff_max_s: Longest pause between two attempts.
        close_timeout_s: Limit of the last write.
    """

    ttl_s: float = 600.0
    op_timeout_s: float = 1.0
    load_timeout_s: float = 30.0
    coalesce_s: float = 0.05
    renew_interval_s: float = 2.0
    probe_interval_s: float = 5.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    close_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.renew_interval_s * 2 > self.ttl_s:
            raise ValueError(
                f"ttl_s={self.ttl_s} must be at least twice renew_interval_s="
                f"{self.renew_interval_s}, or entries expire between two leases"
            )


class EntryCodec:
    """The stored form of one scope's entries.

    An entry that was altered, or that belongs to another block or scope, must not be taken for a
    good one: its generation could be right by chance, and then its hash would name the wrong
    content. So 49 bytes are stored: format, hash, generation, and a checksum over those, the block
    and the scope. It finds accidents; whoever can write to the store on purpose can also sum up.
    """

    __slots__ = ("_key",)

    def __init__(self, scope: PrefixScope) -> None:
        self._key = hashlib.sha256(scope.key.encode()).digest()

    def encode(self, block_id: int, block_hash: bytes, generation: int) -> bytes:
        """Pack an entry.

        Raises:
            ValueError: the hash has not 32 bytes, or the generation does not fit 64 bits.
        """
        if len(block_hash) != HASH_BYTES:
            raise ValueError(f"block hash must have {HASH_BYTES} bytes, got {len(block_hash)}")
        try:
            packed = _ENTRY.pack(_ENTRY_FORMAT, block_hash, generation)
        except struct.error as error:
            raise ValueError(f"generation must be an int64, got {generation!r}") from error
        return packed + self._checksum(block_id, packed)

    def decode(self, block_id: int, value: bytes) -> tuple[bytes, int] | None:
        """Unpack a stored entry; None if it is not one of this format, block and scope."""
        if len(value) != _ENTRY.size + _CHECKSUM_BYTES:
            return None
        packed = value[: _ENTRY.size]
        entry_format, block_hash, generation = _ENTRY.unpack(packed)
        if entry_format != _ENTRY_FORMAT or generation < 0:
            return None
        if value[_ENTRY.size :] != self._checksum(block_id, packed):
            return None
        return block_hash, generation

    def _checksum(self, block_id: int, packed: bytes) -> bytes:
        digest = hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES, key=self._key)
        digest.update(block_id.to_bytes(8, "little"))
        return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A parsed redis:// or rediss:// URL. `repr` and `str` show no credentials."""

    host: str
    port: int
    db: int
    tls: bool
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls_options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"


_DEFAULT_PORT = 6379
_TLS_OPTIONS = {
    "ssl_ca_certs": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": ("true", "false"),
}


def parse_store_url(url: str) -> RedisAddress | None:
    """Read a store URL; None stands for memory://.

    Messages never quote the URL: whatever part is wrong, it may be a piece of the password.

    Raises:
        ValueError: the URL is not redis://, rediss:// or memory://, or a part of it is wrong.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in ("redis", "rediss", "memory"):
        raise ValueError(
            "the store URL must be redis://[[user]:password@]host[:port][/db], "
            "rediss://... (TLS) or memory://"
        )
    if scheme == "memory":
        if rest.strip("/"):
            raise ValueError("memory:// takes nothing after the slashes")
        return None
    hint = "; percent-encode special characters of a user name or password"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"the store URL's host is malformed{hint}") from error
    if parts.fragment or "#" in url:
        raise ValueError(f"the store URL must not contain '#'{hint}")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"the store URL's port must be a number in 1-65535{hint}") from error
    if port == 0:
        raise ValueError("the store URL's port must be a number in 1-65535")
    if not parts.hostname:
        raise ValueError("the store URL names no host, as in redis://127.0.0.1:6379/0")
    path = parts.path.strip("/")
    if path and not (path.isascii() and path.isdigit()):
        raise ValueError(f"the store URL's path must be a database number, as in /0{hint}")
    return RedisAddress(
        host=parts.hostname,
        port=port if port is not None else _DEFAULT_PORT,
        db=int(path or 0),
        tls=scheme == "rediss",
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls_options=_tls_options(parts.query, tls=scheme == "rediss"),
    )


def _tls_options(query: str, *, tls: bool) -> tuple[tuple[str, str], ...]:
    options = parse_qsl(query, keep_blank_values=True)
    for name, value in options:
        allowed = _TLS_OPTIONS.get(name, ())
        if not tls or name not in _TLS_OPTIONS:
            raise ValueError(
                "the store URL has an unknown option after '?'; known, with rediss:// only: "
                + ", ".join(_TLS_OPTIONS)
            )
        if (allowed is not None and value.lower() not in allowed) or not value:
            raise ValueError(
                f"the store URL's option {name} must be "
                + (" or ".join(allowed) if allowed else "a path")
            )
    return tuple(options)


def open_prefix_store(
    url: str,
    *,
    deployment: str,
    shard: str = "0",
    timing: StoreTiming | None = None,
    observer: StoreObserver | None = None,
) -> PrefixStore:
    """Build the store that `url` names; `start` it before use.

    Args:
        url: redis://, rediss:// or memory://.
        deployment: Separates the term counters of installations that share a server.
        shard: Separates the replicas of control planes that share a deployment.
        timing: Defaults suit production.
        observer: Receives what metrics need.

    Raises:
        ValueError: the URL is wrong; the message says how, without quoting it.
    """
    from control_plane.memory_prefix_store import MemoryPrefixStore

    address = parse_store_url(url)
    timing = timing or StoreTiming()
    observer = observer or StoreObserver()
    if address is None:
        return MemoryPrefixStore(timing=timing, observer=observer)
    # Imported here: without a server, the redis package is not needed.
    from control_plane.redis_prefix_store import RedisPrefixStore

    return RedisPrefixStore(
        address, deployment=deployment, shard=shard, timing=timing, observer=observer
    )
