"""Names of KV block contents: a SHA-256 chain over full blocks of tokens.

Two blocks have one hash only if everything that shaped their KV is the same: all tokens up to and
in the block, the model, the adapter, the cache salt and the deployment. The encoding is canonical,
so that every process, restart and language computes the same names:

    field(tag, payload) = tag (1 byte) | length of payload (uint32, little-endian) | payload
    root  = SHA-256("PWR1" | field(1, deployment seed) | field(2, model fingerprint)
                    | field(3, cache salt, UTF-8) | field(4, adapter id, UTF-8)
                    | field(5, adapter version, UTF-8))
    block = SHA-256("PWB1" | field(1, parent hash) | field(2, tokens as int32, little-endian)
                    | field(3 + kind, payload) for every extra, ascending)

The parent of a sequence's first block is its root. The number of tokens is part of the encoding, so
block sizes never mix.

Owns: the encoding. Does not know: which blocks exist or who holds them.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from control_plane.request import BlockHash, Request, Sequence


class _Hash(Protocol):
    def digest(self) -> BlockHash: ...


# Typed once here: wrapping every digest in `BlockHash(...)` is a measurable part of hashing it.
_sha256 = cast("Callable[[bytes], _Hash]", sha256)

_ROOT_MAGIC = b"PWR1"
# Four bytes: with 16-token blocks the whole message then fits two SHA-256 compressions.
_BLOCK_MAGIC = b"PWB1"
_FIRST_EXTRA_TAG = 3
_MAX_CACHED_ROOTS = 1024


def _field(tag: int, payload: bytes) -> bytes:
    return struct.pack("<BI", tag, len(payload)) + payload


def hash_root(
    *,
    deployment_seed: bytes,
    model_fingerprint: bytes,
    cache_salt: str = "",
    adapter: str = "",
    adapter_version: str = "",
) -> BlockHash:
    """The parent of every first block of one (deployment, model, salt, adapter)."""
    return _sha256(
        _ROOT_MAGIC
        + _field(1, deployment_seed)
        + _field(2, model_fingerprint)
        + _field(3, cache_salt.encode())
        + _field(4, adapter.encode())
        + _field(5, adapter_version.encode())
    ).digest()


def hash_block(
    parent: BlockHash, token_bytes: bytes, extras: Iterable[tuple[int, bytes]] = ()
) -> BlockHash:
    """The name of one full block.

    Args:
        parent: Hash of the block before it, or the root.
        token_bytes: The block's tokens, int32 little-endian back to back.
        extras: What else shaped the KV, as (kind, payload): kinds in [0, 252], strictly ascending.

    Raises:
        ValueError: kinds are out of range or not strictly ascending: two encodings of one fact
            would give it two names.
    """
    message = _BLOCK_MAGIC + _field(1, parent) + _field(2, token_bytes)
    last = -1
    for kind, payload in extras:
        if not last < kind <= 0xFF - _FIRST_EXTRA_TAG:
            raise ValueError(f"extras must ascend within [0, 252], got {kind} after {last}")
        message += _field(_FIRST_EXTRA_TAG + kind, payload)
        last = kind
    return _sha256(message).digest()


class BlockHasher:
    """Hashes the full blocks of sequences of one model.

    The chain is cached on the sequence (`Sequence.block_hashes`): replicas of one model share
    deployment, fingerprint and block size, so it stays valid through migration.
    """

    def __init__(
        self, *, deployment_seed: bytes, model_fingerprint: bytes, block_size: int
    ) -> None:
        self.block_size = block_size
        self._deployment_seed = deployment_seed
        self._model_fingerprint = model_fingerprint
        self._roots: OrderedDict[tuple[str, str, str], BlockHash] = OrderedDict()
        # The constant bytes before and after the parent of a block without extras.
        self._before_parent = _BLOCK_MAGIC + struct.pack("<BI", 1, 32)
        self._before_tokens = struct.pack("<BI", 2, 4 * block_size)
        self._pack = struct.Struct(f"<{block_size}i").pack

    def root(self, request: Request) -> BlockHash:
        """The parent of the request's first block; recently used ones are remembered."""
        key = (request.cache_salt, request.adapter, request.adapter_version)
        root = self._roots.get(key)
        if root is None:
            root = hash_root(
                deployment_seed=self._deployment_seed,
                model_fingerprint=self._model_fingerprint,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                adapter_version=request.adapter_version,
            )
            self._roots[key] = root
            if len(self._roots) > _MAX_CACHED_ROOTS:
                self._roots.popitem(last=False)
        else:
            self._roots.move_to_end(key)
        return root

    def extend(self, sequence: Sequence, num_tokens: int) -> list[BlockHash]:
        """Make `sequence.block_hashes` cover all full blocks of its first `num_tokens` tokens.

        Returns:
            `sequence.block_hashes`, which may cover more.
        """
        hashes = sequence.block_hashes
        block_size = self.block_size
        first, num_blocks = len(hashes), num_tokens // block_size
        if first >= num_blocks:
            return hashes
        request = sequence.request
        parent = hashes[-1] if hashes else self.root(request)
        start = first * block_size - request.prompt_token_ids.size
        before_parent, before_tokens = self._before_parent, self._before_tokens
        if start >= 0 and num_blocks == first + 1:
            # A decoding sequence that filled a block: by far the most frequent call.
            tokens = self._pack(*sequence.output_token_ids[start : start + block_size])
            hashes.append(_sha256(before_parent + parent + before_tokens + tokens).digest())
            return hashes
        ids = sequence.token_ids(first * block_size, num_blocks * block_size)
        data = ids.astype(np.dtype("<i4"), copy=False).tobytes()
        step = 4 * block_size
        for at in range(0, len(data), step):
            message = before_parent + parent + before_tokens + data[at : at + step]
            parent = _sha256(message).digest()
            hashes.append(parent)
        return hashes
