"""The name under which a replica's entries are kept changes with any of its ranks."""

from __future__ import annotations

import dataclasses

from fake_model import FakeModelRunner
from fake_worker import fake_identity

from control_plane.replica import ReplicaShape, WorkerFacts, read_hello
from data_plane.stream_protocol import StreamProtocol


def rank(index: int, epoch: bytes) -> WorkerFacts:
    """What a rank says of itself. A Hello of several ranks is refused, so each says it is alone."""
    identity = fake_identity(FakeModelRunner(), worker_id=f"w{index}", epoch=epoch)
    facts = read_hello(StreamProtocol(identity).hello().hello, peer="test")
    return dataclasses.replace(facts, rank=index, tp_size=2)


def epoch_of(*ranks: WorkerFacts) -> bytes:
    return ReplicaShape.of_ranks(ranks).replica_epoch


def test_one_of_two_ranks_restarted_makes_another_replica_epoch() -> None:
    before = epoch_of(rank(0, b"a" * 16), rank(1, b"b" * 16))
    assert epoch_of(rank(0, b"a" * 16), rank(1, b"b" * 16)) == before
    assert epoch_of(rank(0, b"c" * 16), rank(1, b"b" * 16)) != before
    assert epoch_of(rank(0, b"a" * 16), rank(1, b"c" * 16)) != before


def test_ranks_that_change_places_make_another_replica_epoch() -> None:
    first, second = rank(0, b"a" * 16), rank(1, b"b" * 16)
    assert epoch_of(first, second) != epoch_of(second, first)


def test_a_replica_offers_what_its_smallest_rank_can_do() -> None:
    small = dataclasses.replace(rank(1, b"b" * 16), num_blocks=10, max_num_seqs=2)
    shape = ReplicaShape.of_ranks([rank(0, b"a" * 16), small])
    assert (shape.num_blocks, shape.max_num_seqs) == (10, 2)
