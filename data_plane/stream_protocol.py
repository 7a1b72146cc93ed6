"""The worker's rules of the control stream as a state machine: messages in, messages out.

    DISCONNECTED --hello()--> AWAITING_WELCOME --Welcome--> AWAITING_RESET --Reset--> SERVING
    SERVING --a plan is refused, a step fails--> DISCARDING --Reset--> SERVING
    any --stream_lost()--> DISCONNECTED

Owns: phase, window, highest term, which results may still be sent, and the RowTable. Does not
know: sockets, threads, clocks, or how a step is executed. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from data_plane.plan_refused import PlanRefused, Refusal, make_status
from data_plane.row_table import RowTable
from protos.pagewire.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from data_plane.step_work import Int64Array, StepError, StepOutput, StepWork

PROTOCOL_VERSION = 1
GENERATIONS_PER_MESSAGE = 64 * 1024
# The most that Hello may say of a version or a term; a worker beyond it would be refused for good.
MAX_NUMBER = 1 << 62
# How far a Reset may go beyond the applied version. A wrong one must leave room for right ones
# behind it. It covers the versions of thousands of years, since a replay begins a new worker there.
MAX_RESET_JUMP = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What Hello says about this worker. One per KV allocation.

    Attributes:
        epoch: 16 random bytes, drawn when the KV memory was allocated.
        model_fingerprint: 32 bytes, KV dtype included.
        num_kv_heads: Per rank.
        kv_dtype: "float32", "bfloat16", "float16" or "fp8_e4m3".
        num_blocks: The null block included.
        vocab_size: Not on the wire; bounds the token ids of plans.
    """

    worker_id: str
    replica_id: str
    rank: int = 0
    tp_size: int = 1
    epoch: bytes
    model_fingerprint: bytes
    num_layers: int
    num_kv_heads: int
    head_size: int
    kv_dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    backend: str = ""
    device: str = ""
    software_version: str = ""
    rendezvous_address: str = ""

    def __post_init__(self) -> None:
        if len(self.epoch) != 16:
            raise ValueError(f"epoch must have 16 bytes, got {len(self.epoch)}")
        if len(self.model_fingerprint) != 32:
            raise ValueError(
                f"model_fingerprint must have 32 bytes, got {len(self.model_fingerprint)}"
            )
        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank must be in [0, tp_size={self.tp_size}), got {self.rank}")


class Phase(Enum):
    DISCONNECTED = "disconnected"
    AWAITING_WELCOME = "awaiting_welcome"
    AWAITING_RESET = "awaiting_reset"
    SERVING = "serving"
    DISCARDING = "discarding"


class ProtocolViolation(Exception):  # noqa: N818 - the other side's doing
    """The control plane broke a rule: the stream has to end, a new one is tried.

    Attributes:
        reason: Upper-case name for logs.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(slots=True, kw_only=True)
class Reaction:
    """What one received message asks of the I/O around the state machine, in this order.

    Attributes:
        welcome: Set when the message was a Welcome: its lease and whether it wants Generations.
        reset_version: Set when it was a Reset: ordered steps that have not started are dropped
            and the runner is reset before any of `works`.
        works: Steps to execute, in order.
        messages: To send now.
    """

    welcome: worker_pb2.Welcome | None = None
    reset_version: int | None = None
    works: list[StepWork] = field(default_factory=list["StepWork"])
    messages: list[worker_pb2.WorkerMessage] = field(default_factory=list[worker_pb2.WorkerMessage])


class StreamProtocol:
    """State of one worker over all its streams: KV, versions and the highest term outlive them."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.row_table = RowTable(
            max_num_seqs=identity.max_num_seqs,
            num_blocks=identity.num_blocks,
            max_model_len=identity.max_model_len,
            block_size=identity.block_size,
            max_num_batched_tokens=identity.max_num_batched_tokens,
            vocab_size=identity.vocab_size,
        )
        self._phase = Phase.DISCONNECTED
        self._highest_term = 0
        self._lookahead = 0
        self._num_blocks = identity.num_blocks
        self._num_unconfirmed = 0
        self._reset_version = 0
        # Highest version of any plan seen on this stream, refused and discarded ones included.
        self._seen_version = 0
        self._step_has_failed = False

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def highest_term(self) -> int:
        """Highest term of any accepted Welcome; 0 for none."""
        return self._highest_term

    @property
    def num_unconfirmed(self) -> int:
        """Steps that were ordered on this stream and whose outcome was not sent."""
        return self._num_unconfirmed

    @property
    def is_idle(self) -> bool:
        """Whether nothing is ordered and every row is finished: a draining worker may leave."""
        return self._num_unconfirmed == 0 and self.row_table.num_live_rows == 0

    def hello(self) -> worker_pb2.WorkerMessage:
        """Begin a stream. Steps of an earlier one are dropped or have ended by now."""
        self._phase = Phase.AWAITING_WELCOME
        self._num_unconfirmed = 0
        self._seen_version = 0
        self._step_has_failed = False
        identity = self.identity
        return worker_pb2.WorkerMessage(
            hello=worker_pb2.Hello(
                protocol_version=PROTOCOL_VERSION,
                worker_id=identity.worker_id,
                replica_id=identity.replica_id,
                rank=identity.rank,
                tp_size=identity.tp_size,
                epoch=identity.epoch,
                applied_version=self.row_table.applied_version,
                highest_term=self._highest_term,
                model_fingerprint=identity.model_fingerprint,
                kv_geometry=worker_pb2.KvGeometry(
                    num_layers=identity.num_layers,
                    num_kv_heads=identity.num_kv_heads,
                    head_size=identity.head_size,
                    dtype=identity.kv_dtype,
                    block_size=identity.block_size,
                ),
                num_blocks=identity.num_blocks,
                max_num_seqs=identity.max_num_seqs,
                max_model_len=identity.max_model_len,
                max_num_batched_tokens=identity.max_num_batched_tokens,
                backend=identity.backend,
                device=identity.device,
                software_version=identity.software_version,
                rendezvous_address=identity.rendezvous_address,
            )
        )

    def stream_lost(self) -> None:
        """End the stream. Rows stay until the Reset of the next one; results are dropped."""
        self._phase = Phase.DISCONNECTED
        self._num_unconfirmed = 0

    def receive(self, message: worker_pb2.ControlMessage) -> Reaction:
        """Take one message of the control plane.

        Raises:
            ProtocolViolation: it may not come here; the stream has to end.
        """
        kind = message.WhichOneof("message")
        if kind == "plan" and self._phase in (Phase.SERVING, Phase.DISCARDING):
            return self._receive_plan(message.plan)
        if kind == "reset" and self._phase not in (Phase.DISCONNECTED, Phase.AWAITING_WELCOME):
            return self._receive_reset(message.reset)
        if kind == "welcome" and self._phase is Phase.AWAITING_WELCOME:
            return self._receive_welcome(message.welcome)
        if kind == "heartbeat" and self._phase not in (Phase.DISCONNECTED, Phase.AWAITING_WELCOME):
            return Reaction()
        if kind is None:
            raise ProtocolViolation(
                "UNKNOWN_MESSAGE",
                "the control plane sent a message of an unknown kind; is it a newer version? "
                f"This worker speaks protocol version {PROTOCOL_VERSION}",
            )
        raise ProtocolViolation(
            "UNEXPECTED_MESSAGE", f"the control plane sent {kind} in phase {self._phase.value}"
        )

    def step_done(
        self, work: StepWork, output: StepOutput, *, waited_us: int | None = None
    ) -> list[worker_pb2.WorkerMessage]:
        """Return what to send when a step's results are in; steps end in the order of receive.

        Args:
            work: The step.
            output: What it gave.
            waited_us: How long it waited for the end of the step before it, where that is known.
        """
        if not self._may_report(work):
            return []
        self._num_unconfirmed -= 1
        self.row_table.mark_finished(work.version, output.finished_rows)
        if self.identity.rank > 0:
            if not work.is_last_step:
                return []
            return [worker_pb2.WorkerMessage(ack=worker_pb2.Ack(version=work.version))]
        return [
            worker_pb2.WorkerMessage(
                step_result=worker_pb2.StepResult(
                    version=work.version,
                    step=work.step,
                    counts=output.counts.astype("u1", copy=False).tobytes(),
                    token_ids=output.token_ids.astype("<i4", copy=False).tobytes(),
                    finished_rows=output.finished_rows.astype("<i4", copy=False).tobytes(),
                    finish_reasons=output.finish_reasons.astype("u1", copy=False).tobytes(),
                    device_time_us=output.device_time_us,
                    waited_us=waited_us,
                )
            )
        ]

    def step_failed(self, work: StepWork, error: StepError) -> list[worker_pb2.WorkerMessage]:
        """Return what to send when a step failed; nothing counts until the Reset."""
        if not self._may_report(work):
            return []
        self._phase = Phase.DISCARDING
        self._step_has_failed = True
        self._num_unconfirmed = 0
        return [
            worker_pb2.WorkerMessage(
                step_failed=worker_pb2.StepFailed(
                    version=work.version,
                    step=work.step,
                    status=make_status(error.reason, error.message, code=error.code),
                )
            )
        ]

    def _may_report(self, work: StepWork) -> bool:
        # Results behind a refused plan still count: its predecessors were applied. Results behind
        # a failed step, of an earlier stream, or at or below a Reset do not.
        return (
            self._phase in (Phase.SERVING, Phase.DISCARDING)
            and not self._step_has_failed
            and work.version > self._reset_version
        )

    def _receive_welcome(self, welcome: worker_pb2.Welcome) -> Reaction:
        if welcome.term < self._highest_term:
            raise ProtocolViolation(
                "STALE_TERM",
                f"the control plane has term {welcome.term}, this worker has served term "
                f"{self._highest_term}: another control plane took over",
            )
        if not 2 <= welcome.num_blocks <= self.identity.num_blocks:
            raise ProtocolViolation(
                "NUM_BLOCKS_OUT_OF_RANGE",
                f"the control plane wants to use {welcome.num_blocks} blocks, this worker has "
                f"{self.identity.num_blocks}",
            )
        if welcome.lookahead < 0 or welcome.lease.ToNanoseconds() <= 0:
            raise ProtocolViolation(
                "BAD_WELCOME",
                f"lookahead is {welcome.lookahead} and lease "
                f"{welcome.lease.ToNanoseconds() / 1e9} s; they must be >= 0 and > 0",
            )
        if welcome.term > MAX_NUMBER:
            raise ProtocolViolation(
                "BAD_WELCOME",
                f"the control plane has term {welcome.term}, which must not exceed {MAX_NUMBER}: "
                "no term could follow it",
            )
        self._highest_term = welcome.term
        self._lookahead = welcome.lookahead
        self._num_blocks = welcome.num_blocks
        self._phase = Phase.AWAITING_RESET
        return Reaction(welcome=welcome)

    def _receive_reset(self, reset: worker_pb2.Reset) -> Reaction:
        applied = self.row_table.applied_version
        above, limit = max(applied, self._seen_version), min(applied + MAX_RESET_JUMP, MAX_NUMBER)
        if reset.version <= above:
            raise ProtocolViolation(
                "RESET_NOT_ABOVE",
                f"Reset to version {reset.version}, which must exceed {above}",
            )
        if reset.version > limit:
            # Measured from what was applied: a plan that was refused could name any version.
            raise ProtocolViolation(
                "RESET_TOO_HIGH",
                f"Reset to version {reset.version}, which must not exceed {limit}: this worker is "
                f"at {applied}, and versions must be left",
            )
        self.row_table.reset(reset.version, num_blocks=self._num_blocks)
        self._reset_version = reset.version
        self._num_unconfirmed = 0
        self._step_has_failed = False
        self._phase = Phase.SERVING
        return Reaction(reset_version=reset.version)

    def _receive_plan(self, plan: worker_pb2.Plan) -> Reaction:
        self._seen_version = max(self._seen_version, plan.version)
        if self._phase is Phase.DISCARDING or plan.version <= self._reset_version:
            return Reaction()
        try:
            window = self._lookahead + 1
            if self._num_unconfirmed + max(plan.num_steps, 1) > window:
                raise PlanRefused(
                    Refusal.TOO_MANY_UNCONFIRMED,
                    f"{self._num_unconfirmed} steps are unconfirmed and the plan has "
                    f"{plan.num_steps}; together they may be {window}",
                    field="num_steps",
                    value=self._num_unconfirmed + plan.num_steps,
                    limit=window,
                )
            works = self.row_table.apply(plan)
        except PlanRefused as refusal:
            self._phase = Phase.DISCARDING
            nack = worker_pb2.Nack(
                version=plan.version,
                status=make_status(refusal.reason, refusal.message, metadata=refusal.metadata),
            )
            return Reaction(messages=[worker_pb2.WorkerMessage(nack=nack)])
        self._num_unconfirmed += len(works)
        return Reaction(works=works)


def generation_messages(
    generations: Int64Array, *, per_message: int = GENERATIONS_PER_MESSAGE
) -> Iterator[worker_pb2.WorkerMessage]:
    """Yield `generations` ([num_blocks] int64) as Generations messages, ascending."""
    for first in range(0, generations.size, per_message):
        chunk = generations[first : first + per_message]
        yield worker_pb2.WorkerMessage(
            generations=worker_pb2.Generations(
                first_block_id=first,
                generations=chunk.astype("<i8", copy=False).tobytes(),
                is_last=first + per_message >= generations.size,
            )
        )
