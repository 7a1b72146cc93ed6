"""Snapshots for people and dashboards: plain values, taken between two steps.

Field names mirror `ReplicaStats` and `WorkerStats` of the public API. Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker as the control plane sees it."""

    worker_id: str
    rank: int
    epoch: str  # hex
    backend: str
    device: str
    last_message_ms: int
    draining: bool
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """One replica; `workers` is empty where it was lost a moment ago.

    Attributes:
        num_steps: Confirmed steps.
        wasted_steps: Those that computed nothing for anybody: ordered before an end was known.
        wasted_rows: Rows of confirmed steps whose sequence had ended before.
        lookahead: Steps kept in flight beyond the awaited one in steady decode.
        round_trip_s: Time of a step beyond its execution; None until it is known.
    """

    replica_id: str
    model: str
    workers: tuple[WorkerSnapshot, ...]
    usable_blocks: int
    free_blocks: int
    cached_blocks: int
    num_requests_running: int
    num_requests_waiting: int
    sent_version: int
    confirmed_version: int
    replica_epoch: str  # hex
    block_size: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_resets: int
    num_nacks: int
    num_step_failures: int
    num_steps: int
    wasted_steps: int
    wasted_rows: int
    device_time_us: int
    replayed_tokens: int
    plans_sent: int
    plan_bytes: int
    lookahead: int
    round_trip_s: float | None
    generation_tokens: int
    prompt_tokens_sent: int
    adopted_blocks: int
    refused_entries: int
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Every replica, and what no replica has taken yet.

    Attributes:
        started_at_s: Seconds since the Unix epoch.
        term: 0 until the first worker has attached.
        num_replicas_lost: Losses of workers since the start.
        num_replays: Times a request was handed to a replica again.
        num_stalls: Times that this process did not run, though it could have.
        stalled_s: For how long, together.
    """

    replicas: tuple[ReplicaSnapshot, ...]
    num_requests_unplaced: int
    num_requests_live: int
    term: int
    started_at_s: float
    prefix_store: str
    num_replicas_lost: int
    num_replays: int
    num_stalls: int
    stalled_s: float
