"""All replicas of this control plane, and every live request.

Owns: the registry of replicas, where each request runs, what waits for a replica, the term.
Does not know text, clients, messages of the control stream, or how a step is made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from control_plane.prefix_store import PrefixStore
    from control_plane.request import FinishReason, Request
    from control_plane.request import Sequence as RequestSequence
    from control_plane.served_model import ServedModel
    from control_plane.stats import ClusterSnapshot
    from control_plane.token_stream import TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Limits and times of the engine side. Times in seconds.

    Attributes:
        deployment: Namespace of the prefix store.
        shard: Which control plane of the deployment this is; terms are counted per shard.
        lookahead: Steps ordered beyond the one whose result is awaited.
        max_num_batched_tokens: Most tokens per step; None: what the worker announces.
        max_num_seqs: Most rows per replica; None: what the worker announces.
        block_size: Refuse workers with another one; None: the first worker decides.
        kv_dtype: Refuse workers with another one; None: the first worker decides.
        prefix_caching: Whether blocks are found again by their hash.
        max_bypass: How long others may overtake a head of the queue that does not fit, in steps.
        lease_s: Silence after which a worker counts as gone.
        step_timeout_s: A step unconfirmed for this long loses the worker even if it heartbeats.
        replica_wait_s: How long a request waits for a replica before it fails as unavailable.
        max_queued_requests: Requests without a row, over all replicas, before new ones are refused.
        max_queued_tokens: Prompt tokens of those requests, likewise.
        term_gather_s: How long after the start Hellos are awaited before the term is settled.
        audit_interval_s: Least time between two audits of an idle replica's pool.
    """

    deployment: str = "default"
    shard: str = "0"
    lookahead: int = 2
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_dtype: str | None = None
    prefix_caching: bool = True
    max_bypass: int = 64
    lease_s: float = 10.0
    step_timeout_s: float = 120.0
    replica_wait_s: float = 30.0
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    term_gather_s: float = 0.5
    audit_interval_s: float = 1.0


class Cluster:
    """Where requests enter and tokens come back. Everything runs on one event loop.

    Deadlines are absolute, on `clock` (monotonic seconds).
    """

    def __init__(
        self,
        config: ClusterConfig,
        models: Sequence[ServedModel],
        prefix_store: PrefixStore,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs until `start`. The prefix store is started and closed by the caller."""
        self.config = config
        self.models = {model.name: model for model in models}
        raise NotImplementedError

    async def start(self) -> None:
        """Begin to take workers and requests."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End every worker's stream and fail what is still live with ShuttingDownError."""
        raise NotImplementedError

    async def failed(self) -> NoReturn:
        """Wait for a broken invariant; the process must end on it.

        Raises:
            InvariantError: This process contradicts itself.
        """
        raise NotImplementedError

    def submit(
        self, request: Request, deadline: float | None = None, *, model: str | None = None
    ) -> TokenStream:
        """Take a request; its tokens come back through the stream.

        Args:
            request: Its `req_id` is unique among live requests (the edge sees to that).
            deadline: Bounds only the wait for a replica; the edge aborts what runs past it.
            model: Name of the served model; None where there is only one.

        Raises:
            RequestTooLongError: It fits no ready replica; names the longest that does.
            OverloadedError: The queue is full.
            ShuttingDownError: A drain has begun.
            UnknownModelError: No such model, or none named and several served.
        """
        raise NotImplementedError

    def abort(self, request: Request) -> None:
        """Forget a request in any state. Idempotent. Its stream fails with AbortedError."""
        raise NotImplementedError

    def finish(
        self, sequence: RequestSequence, num_output_tokens: int, reason: FinishReason
    ) -> None:
        """End a sequence at a stop string: what was computed past it is dropped.

        Its TokenStream gets no further news of the sequence, not even its end: the caller knows.
        """
        raise NotImplementedError

    def num_ready(self, model: str) -> int:
        """Replicas of the model that take work now."""
        raise NotImplementedError

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones go on."""
        raise NotImplementedError

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is live; False if the time ran out first.

        What is left then fails with ShuttingDownError, so that clients resume elsewhere.
        """
        raise NotImplementedError

    async def superseded(self) -> None:
        """Return once a worker reported a higher term: another control plane is active.

        A drain has begun by then; the caller waits for it and ends the process.
        """
        raise NotImplementedError

    def audit(self) -> None:
        """Check every replica's pool.

        Raises:
            InvariantError: Blocks leaked or are owned twice.
        """
        raise NotImplementedError

    def stats(self) -> ClusterSnapshot:
        """A snapshot of every replica."""
        raise NotImplementedError
