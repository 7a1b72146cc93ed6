"""Damaged messages into both ends of the control stream: refused ones change nothing.

Every message is one that really came, at a moment that really was (`fuzz_situations`), damaged by
`message_mutator`. Both runs count what became of them, and raise on the first that broke a rule.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from fuzz_situations import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    Scenario,
    Situation,
    freeze,
    thaw,
)
from google.protobuf.message import DecodeError
from message_mutator import Mutator
from row_table_tools import check_invariants, snapshot

from control_plane.errors import ProtocolError
from data_plane.stream_protocol import Phase, ProtocolViolation
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SCENARIOS = 12
MESSAGES_PER_SCENARIO = 90
# A refused message, then the true one, and everything to its end: so often.
PLAY_ON_EVERY = 100
# An error has to fit into the trailers of a call, beside everything else.
MAX_ERROR_CHARS = 1500
SMALL = [*range(NUM_BLOCKS + 2), MAX_MODEL_LEN, VOCAB_SIZE - 1, VOCAB_SIZE]


@dataclass
class Outcomes:
    """What became of the messages."""

    counts: Counter[str] = field(default_factory=Counter)
    num_played_on: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{self.total} messages ({shares}), {self.num_played_on} played on to the end"


class BrokenRuleError(AssertionError):
    """A message did what none may do; says which."""


def fuzz_worker_messages(count: int, seed: int) -> Outcomes:
    """Damaged WorkerMessages into `EngineCore.receive`."""

    def situations(scenario: Scenario) -> list[Situation]:
        return scenario.for_control

    return _fuzz(count, seed, situations, _to_control)


def fuzz_control_messages(count: int, seed: int) -> Outcomes:
    """Damaged ControlMessages into the worker's `StreamProtocol.receive`."""

    def situations(scenario: Scenario) -> list[Situation]:
        return scenario.for_worker

    return _fuzz(count, seed, situations, _to_worker)


def _fuzz(
    count: int,
    seed: int,
    situations_of: Callable[[Scenario], list[Situation]],
    deliver: Callable[[Situation, bytes, Any], tuple[str, Any]],
) -> Outcomes:
    rng = random.Random(seed)
    found: list[tuple[int, Situation]] = []
    for number in range(NUM_SCENARIOS):
        scenario = Scenario(seed * 1000 + number, is_recorded=True)
        scenario.play(MESSAGES_PER_SCENARIO)
        found += [(seed * 1000 + number, one) for one in situations_of(scenario)]
    mutator = Mutator(rng, [one.message for _, one in found], SMALL)
    outcomes = Outcomes()
    while outcomes.total < count:
        number, situation = rng.choice(found)
        receiver: Any = None
        # Several at one moment: as long as none of them changes anything, it stays that moment.
        for _ in range(min(20, count - outcomes.total)):
            # Now and then a message of another moment, itself damaged or not.
            message = rng.choice(found)[1].message if rng.random() < 0.1 else situation.message
            data = mutator.mutate(message)
            try:
                outcome, receiver = deliver(situation, data, receiver)
                outcomes.counts[outcome] += 1
                is_refused = outcome in ("refused", "ignored")
                if is_refused and outcomes.total % PLAY_ON_EVERY == 0:
                    _play_on(number, situation, data, deliver)
                    outcomes.num_played_on += 1
            except Exception as error:
                raise BrokenRuleError(
                    f"seed {seed}, scenario {number}, message {situation.play}, "
                    f"instead of {situation.message}: {data.hex()}"
                ) from error
    return outcomes


def _play_on(number: int, situation: Situation, data: bytes, deliver: object) -> None:
    """Come to the same moment, be refused the same message, and go on as if nothing had been."""
    scenario = Scenario(number, stop_at=situation.play)
    scenario.play(situation.play + 1)
    queue = scenario.to_control if deliver is _to_control else scenario.to_worker
    assert queue[0] == situation.message, "not the same moment"
    if deliver is _to_control:
        if worker_pb2.WorkerMessage.FromString(data).HasField("drain"):
            return
        with contextlib.suppress(ProtocolError):
            scenario.core.receive(worker_pb2.WorkerMessage.FromString(data), 0.0)
    else:
        message = worker_pb2.ControlMessage.FromString(data)
        try:
            reaction = scenario.worker.protocol.receive(message)
        except ProtocolViolation:
            pass
        else:
            scenario.to_control.extend(reaction.messages)
    scenario.finish()


def _check_error(text: str) -> None:
    assert len(text) <= MAX_ERROR_CHARS, f"an error of {len(text)} characters"


class _Thawed:
    """A receiver at its moment, and how it froze again: orders in sets are its own."""

    def __init__(self, situation: Situation) -> None:
        self.thing: Any = thaw(situation.receiver)
        self._frozen = freeze(self.thing)

    def is_unchanged(self) -> bool:
        return freeze(self.thing) == self._frozen

    def check_unchanged(self) -> None:
        assert self.is_unchanged(), "a message that was refused left a trace"


# To the control plane.


def _to_control(situation: Situation, data: bytes, receiver: Any) -> tuple[str, Any]:
    """Deliver; returns what became of it, and the receiver if it is as it was."""
    try:
        message = worker_pb2.WorkerMessage.FromString(data)
    except DecodeError:
        return "unreadable", receiver
    thawed: _Thawed = receiver or _Thawed(situation)
    core, output = thawed.thing
    logs, num_tokens = _logs(core), output.num_tokens
    before = (core.sent_version, core.confirmed_version, core.counters.num_resets)
    try:
        core.receive(message, 0.0)
    except ProtocolError as error:
        _check_error(str(error))
        if error.reason == "TOO_MANY_RESETS":
            expected = {name: log for name, log in logs.items() if name not in output.failed}
            assert _logs(core) == expected
            core.detach(lost=True)
            core.scheduler.audit()
            return "refused with the replica", None
        thawed.check_unchanged()
        return "refused", thawed
    core.scheduler.audit()
    if core.counters.num_resets > before[2]:
        assert core.sent_version == before[0] + 1
        assert core.num_in_flight == 0
        assert core.num_running == 0
        # A StepFailed may have been the last one that a request could stand.
        expected = {name: log for name, log in logs.items() if name not in output.failed}
        assert _logs(core) == expected, "a Reset changed a token log"
        assert len(output.sent) == 1
        return "answered with a Reset", None
    if core.confirmed_version > before[1]:
        _check_accepted(core, logs, message.step_result)
        assert output.num_tokens - num_tokens <= len(message.step_result.counts)
        return "accepted", None
    if message.HasField("drain"):
        assert core.draining
        return "accepted", None
    if message.HasField("generations"):
        assert _logs(core) == logs
        return "accepted", None
    thawed.check_unchanged()
    return "ignored", thawed


def _logs(core: Any) -> dict[str, list[int]]:
    places = (core.scheduler._running, core.scheduler._draining)
    requests = [request for place in places for request in place]
    requests += core.scheduler._waiting.requests()
    return {one.req_id: list(one.sequences[0].output_token_ids) for one in requests}


def _check_accepted(core: Any, logs: dict[str, list[int]], result: Any) -> None:
    """What is believed could be true: it is for the rows that ran, one token each at most."""
    counts = np.frombuffer(result.counts, np.uint8)
    tokens = np.frombuffer(result.token_ids, "<i4")
    assert counts.size <= MAX_NUM_SEQS
    assert counts.max(initial=0) <= 1
    assert tokens.size == counts.sum()
    for name, log in _logs(core).items():
        old = logs[name]
        assert log[: len(old)] == old
        assert len(log) <= len(old) + 1
        assert all(0 <= token < VOCAB_SIZE for token in log)


# To the worker.


def _to_worker(situation: Situation, data: bytes, receiver: Any) -> tuple[str, Any]:
    try:
        message = worker_pb2.ControlMessage.FromString(data)
    except DecodeError:
        return "unreadable", receiver
    thawed: _Thawed = receiver or _Thawed(situation)
    protocol = thawed.thing
    before = snapshot(protocol.row_table)
    try:
        reaction = protocol.receive(message)
    except ProtocolViolation as violation:
        _check_error(violation.message)
        thawed.check_unchanged()
        return "refused", thawed
    if reaction.messages:
        [nack] = reaction.messages
        assert nack.ByteSize() <= 2 * MAX_ERROR_CHARS
        assert snapshot(protocol.row_table) == before, "a refused plan left a trace"
        assert protocol.phase is Phase.DISCARDING
        return "answered with a Nack", None
    check_invariants(protocol.row_table)
    for work in reaction.works:
        _check_work(protocol.row_table, work)
    if thawed.is_unchanged():
        return "ignored", thawed
    return "accepted", None


def _check_work(table: Any, work: Any) -> None:
    """Nothing that the device would do is out of the bounds of anything."""
    limits = table._state.limits
    ends = work.start_positions + work.num_new_tokens
    assert ((work.rows >= 0) & (work.rows < limits.max_num_seqs)).all()
    assert (np.diff(work.rows) > 0).all()
    assert (work.num_new_tokens > 0).all()
    assert (ends <= limits.max_model_len).all()
    assert (ends <= table._state.rows.num_blocks[work.rows] * limits.block_size).all()
    assert ((work.handed_out > 0) & (work.handed_out < table.num_blocks)).all()
    assert ((work.chunk_token_ids >= 0) & (work.chunk_token_ids < limits.vocab_size)).all()
    assert work.num_new_tokens.sum() <= limits.max_num_batched_tokens
