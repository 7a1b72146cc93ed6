"""Block hashes: fixed vectors, an independent encoder, and no two facts under one name."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.block_hash import BlockHasher, hash_block, hash_root
from control_plane.request import BlockHash, Request, SamplingParams

FINGERPRINT = bytes(range(32))
TOKENS = st.integers(0, 2**31 - 1)


def field(tag: int, payload: bytes) -> bytes:
    return bytes([tag]) + len(payload).to_bytes(4, "little") + payload


def new_request(tokens: list[int], *, salt: str = "", adapter: str = "", version: str = ""):
    return Request(
        req_id="r",
        prompt_token_ids=tokens,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=10_000,
        arrival=0,
        cache_salt=salt,
        adapter=adapter,
        adapter_version=version,
    )


def test_vectors():
    root = hash_root(deployment_seed=b"prod", model_fingerprint=FINGERPRINT)
    salted = hash_root(
        deployment_seed=b"prod",
        model_fingerprint=FINGERPRINT,
        cache_salt="tenant-ä",
        adapter="sql",
        adapter_version="3",
    )
    first = hash_block(root, struct.pack("<16i", *range(16)))
    second = hash_block(first, struct.pack("<16i", *range(2**31 - 16, 2**31)))
    extra = hash_block(salted, struct.pack("<16i", *range(16)), [(0, b"image"), (7, b"")])
    assert [name.hex() for name in (root, salted, first)] == [
        "9bdb7770da7aaf41f4ff85cd12bd728ca666e8c4b159cbe35ff137a525480842",
        "e64d7576fc0c4238fea7e0a4eacf15b531bf36a415e68a2497e6f8edb44958df",
        "63c669c79c01836afc246e90676988856dbe6c8acfbfb63612951e1f38eedd74",
    ]
    assert hash_block(first, b"") != second
    assert [name.hex() for name in (hash_block(root, struct.pack("<16i", *range(16))), extra)] == [
        "63c669c79c01836afc246e90676988856dbe6c8acfbfb63612951e1f38eedd74",
        "0cac2f0cfe8bc1e9beb7b0a3c4ae128fc7168f6c759231016e35cdc7b329d558",
    ]
    other = hash_block(root, struct.pack("<16i", *range(2**31 - 16, 2**31)))
    assert hash_block(first, struct.pack("<16i", *range(2**31 - 16, 2**31))) != other
    hasher = BlockHasher(deployment_seed=b"prod", model_fingerprint=FINGERPRINT, block_size=16)
    tokens = [*range(16), *range(2**31 - 16, 2**31)]
    assert hasher.extend(new_request(tokens).sequences[0], 32) == [first, second]


@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=40),
    output=st.lists(TOKENS, max_size=40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    salt=st.text(st.characters(codec="utf-8"), max_size=5),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_chain_equals_plain_encoding_however_it_is_extended(
    tokens: list[int], output: list[int], block_size: int, salt: str, cuts: list[int]
):
    sequence = new_request(tokens, salt=salt, adapter="a", version="1").sequences[0]
    sequence.output_token_ids += output
    hasher = BlockHasher(deployment_seed=b"d", model_fingerprint=b"m", block_size=block_size)
    known = tokens + output
    for cut in sorted(min(cut, len(known)) for cut in cuts):
        hasher.extend(sequence, cut)
        assert len(sequence.block_hashes) == cut // block_size
    parent = hashlib.sha256(
        b"PWR1" + field(1, b"d") + field(2, b"m") + field(3, salt.encode()) + field(4, b"a")
        + field(5, b"1")
    ).digest()  # fmt: skip
    expected: list[bytes] = []
    for at in range(0, len(known) - block_size + 1, block_size):
        data = b"".join(token.to_bytes(4, "little") for token in known[at : at + block_size])
        parent = hashlib.sha256(b"PWB1" + field(1, parent) + field(2, data)).digest()
        expected.append(parent)
    assert hasher.extend(sequence, len(known)) == expected


FACTS = st.tuples(
    st.binary(max_size=3),  # deployment seed
    st.binary(max_size=3),  # fingerprint
    st.text("ab", max_size=2),  # salt
    st.text("ab", max_size=2),  # adapter
    st.text("ab", max_size=2),  # its version
)


@given(FACTS, FACTS)
def test_roots_are_equal_only_for_equal_facts(
    one: tuple[bytes, bytes, str, str, str], other: tuple[bytes, bytes, str, str, str]
):
    def root(facts: tuple[bytes, bytes, str, str, str]) -> BlockHash:
        seed, fingerprint, salt, adapter, version = facts
        return hash_root(
            deployment_seed=seed,
            model_fingerprint=fingerprint,
            cache_salt=salt,
            adapter=adapter,
            adapter_version=version,
        )

    assert (root(one) == root(other)) == (one == other)


BLOCKS = st.tuples(
    st.binary(max_size=2),
    st.binary(max_size=9),
    st.dictionaries(st.integers(0, 3), st.binary(max_size=2), max_size=2),
)


@given(BLOCKS, BLOCKS)
def test_blocks_are_equal_only_for_equal_facts(
    one: tuple[bytes, bytes, dict[int, bytes]], other: tuple[bytes, bytes, dict[int, bytes]]
):
    def name(facts: tuple[bytes, bytes, dict[int, bytes]]) -> BlockHash:
        parent, tokens, extras = facts
        return hash_block(BlockHash(parent), tokens, sorted(extras.items()))

    assert (name(one) == name(other)) == (one == other)


@pytest.mark.parametrize("extras", [[(1, b""), (1, b"")], [(2, b""), (1, b"")], [(253, b"")]])
def test_extras_that_could_be_written_in_two_ways_are_refused(extras: list[tuple[int, bytes]]):
    with pytest.raises(ValueError, match="extras must ascend"):
        hash_block(BlockHash(bytes(32)), b"", extras)


def test_block_size_is_part_of_the_hash():
    root = hash_root(deployment_seed=b"", model_fingerprint=b"")
    assert hash_block(root, bytes(8)) != hash_block(root, bytes(16))
