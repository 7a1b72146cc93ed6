"""What Prometheus sees, under the names that dashboards of this field know, prefixed `pagewire_`.

Latencies and counts of requests are kept here; the state of replicas is read from a snapshot when
somebody scrapes. Everything lives on the event loop.

Owns: names, buckets. Does not know: where the numbers come from, HTTP (`metrics_server`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from control_plane.prefix_store import StoreObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from control_plane.recording import Recorder
    from control_plane.stats import ClusterSnapshot, ReplicaSnapshot

_PREFIX = "pagewire_"
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_QUEUE_BUCKETS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class LatencyHistogram:
    """Counts per bucket, in seconds. A tenth of the cost of the library's own, which locks."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value_s: float, *, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value_s)] += count
        self._sum += value_s * count

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        family = HistogramMetricFamily(_PREFIX + name, documentation)
        family.add_metric([], buckets, self._sum)
        return family


class StoreMetrics(StoreObserver):
    """What the prefix store reports of itself.

    Attributes:
        is_up: Takes writes.
        num_written: Entries set or removed.
        num_resyncs: Times that all live entries of a replica were written again.
        failures: By kind: unreachable, full, read-only, denied, ...
    """

    def __init__(self) -> None:
        self.is_up = False
        self.num_written = 0
        self.num_resyncs = 0
        self.failures: Counter[str] = Counter()

    def on_state(self, *, available: bool) -> None:
        self.is_up = available

    def on_written(self, num_entries: int) -> None:
        self.num_written += num_entries

    def on_failure(self, kind: str) -> None:
        self.failures[kind] += 1

    def on_resync(self, num_entries: int) -> None:
        self.num_resyncs += 1

    def families(self) -> Iterable[Metric]:
        """Everything, as of now."""
        yield GaugeMetricFamily(
            _PREFIX + "prefix_store_up", "Whether the prefix store takes writes.", value=self.is_up
        )
        yield _counter("prefix_store_writes", "Entries set or removed.", self.num_written)
        yield _counter("prefix_store_resyncs", "Replicas written anew.", self.num_resyncs)
        failure = CounterMetricFamily(
            _PREFIX + "prefix_store_failure", "Operations that failed.", labels=["kind"]
        )
        for kind, count in self.failures.items():
            failure.add_metric([kind], count)
        yield failure


class Metrics:
    """Counters of the edge and of the prefix store. One per process."""

    def __init__(self) -> None:
        self.store = StoreMetrics()
        self.recorder: Recorder | None = None
        self.time_to_first_token = LatencyHistogram(_TOKEN_BUCKETS)
        self.inter_token_latency = LatencyHistogram(_TOKEN_BUCKETS)
        self.e2e_request_latency = LatencyHistogram(_REQUEST_BUCKETS)
        self.request_queue_time = LatencyHistogram(_QUEUE_BUCKETS)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def on_admitted(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens

    def on_ended(
        self,
        *,
        finish_reasons: Sequence[str],
        latency_s: float,
        is_complete: bool,
    ) -> None:
        """A call's request is over.

        Args:
            finish_reasons: One per sequence that ended by itself.
            latency_s: Since the message came in.
            is_complete: Every sequence ended by itself.
        """
        if is_complete:
            self.successes.update(finish_reasons or ["resumed"])
            self.e2e_request_latency.observe(latency_s)

    def on_failed(self, reason: str) -> None:
        """A call ended with an error; `reason` is one of the stable ones, or CANCELLED."""
        self.failures[reason] += 1

    def families(self, snapshot: ClusterSnapshot) -> Iterable[Metric]:
        """Everything, as of now."""
        yield self.time_to_first_token.family(
            "time_to_first_token_seconds", "From the message to the first visible token."
        )
        yield self.inter_token_latency.family(
            "inter_token_latency_seconds", "Between output tokens of one request."
        )
        yield self.e2e_request_latency.family(
            "e2e_request_latency_seconds", "From the message to the last token."
        )
        yield self.request_queue_time.family(
            "request_queue_time_seconds", "From the admission to a row on a replica."
        )
        yield _counter("prompt_tokens", "Prompt tokens admitted.", self.num_prompt_tokens)
        yield _counter("generation_tokens", "Output tokens.", self.num_generation_tokens)
        success = CounterMetricFamily(
            _PREFIX + "request_success",
            "Sequences that ended by themselves.",
            labels=["finished_reason"],
        )
        for reason in dict.fromkeys(("stop", "length", "error", *self.successes)):
            success.add_metric([reason], self.successes[reason])
        yield success
        failure = CounterMetricFamily(
            _PREFIX + "request_failure", "Calls that ended with an error.", labels=["reason"]
        )
        for reason, count in self.failures.items():
            failure.add_metric([reason], count)
        yield failure
        yield from self.store.families()
        if self.recorder is not None:
            yield from _recorder_families(self.recorder)
        yield from _cluster_families(snapshot)


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)


def _recorder_families(recorder: Recorder) -> Iterable[Metric]:
    counts = recorder.counts
    yield GaugeMetricFamily(
        _PREFIX + "recorded_replicas",
        "Replicas that are attached and recorded without a gap.",
        value=recorder.num_active,
    )
    yield _counter("recording_bytes", "Written to recordings.", counts.bytes_written)
    yield _counter("recording_gaps", "Times that messages began to be left out.", recorder.num_gaps)
    yield _counter("recording_missing", "Messages left out.", recorder.num_missing)
    yield _counter("recording_pauses", "Waits for a Reset.", counts.num_pauses)
    yield _counter("recording_failures", "Recordings that ended early.", counts.num_failures)


def _cluster_families(snapshot: ClusterSnapshot) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        _PREFIX + "num_requests_unplaced",
        "Requests that wait for a replica.",
        value=snapshot.num_requests_unplaced,
    )
    yield GaugeMetricFamily(_PREFIX + "term", "Fencing number.", value=snapshot.term)
    yield _counter("replicas_lost", "Replicas lost.", snapshot.num_replicas_lost)
    yield _counter("replays", "Requests handed to a replica again.", snapshot.num_replays)
    yield _counter("stalls", "Times that the control plane did not run.", snapshot.num_stalls)
    yield _counter("stalled_seconds", "Time in which it did not run.", snapshot.stalled_s)
    # Labels never hold an epoch: it changes with every restart and would grow for ever.
    labels = ["model_name", "replica_id"]
    for name, documentation, read in _REPLICA_GAUGES:
        gauge = GaugeMetricFamily(_PREFIX + name, documentation, labels=labels)
        for replica in snapshot.replicas:
            gauge.add_metric([replica.model, replica.replica_id], read(replica))
        yield gauge
    for name, documentation, read in _REPLICA_COUNTERS:
        counter = CounterMetricFamily(_PREFIX + name, documentation, labels=labels)
        for replica in snapshot.replicas:
            counter.add_metric([replica.model, replica.replica_id], read(replica))
        yield counter


def _usage(replica: ReplicaSnapshot) -> float:
    if not replica.usable_blocks:
        return 0.0
    return 1.0 - replica.free_blocks / replica.usable_blocks


_Reading = tuple[str, str, "Callable[[ReplicaSnapshot], float]"]
_REPLICA_GAUGES: tuple[_Reading, ...] = (
    ("replica_ready", "Whether it takes work.", lambda r: r.ready),
    ("num_requests_running", "Sequences that hold a row.", lambda r: r.num_requests_running),
    ("num_requests_waiting", "Requests that wait for a row.", lambda r: r.num_requests_waiting),
    ("kv_cache_usage_perc", "Blocks in use, 1 is all of them.", _usage),
    ("kv_cache_blocks", "Blocks that may be handed out.", lambda r: r.usable_blocks),
    ("kv_cache_cached_blocks", "Blocks with a known prefix.", lambda r: r.cached_blocks),
    (
        "unconfirmed_plans",
        "Plans sent and not confirmed.",
        lambda r: max(0, r.sent_version - r.confirmed_version),
    ),
    ("lookahead", "Steps kept in flight beyond the awaited one.", lambda r: r.lookahead),
    (
        "round_trip_seconds",
        "Time of a step beyond its execution; 0 until it is known.",
        lambda r: r.round_trip_s or 0.0,
    ),
)
_REPLICA_COUNTERS: tuple[_Reading, ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda r: r.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found.", lambda r: r.prefix_hits),
    ("adopted_blocks", "Cached blocks taken over from the store.", lambda r: r.adopted_blocks),
    ("refused_entries", "Index entries that the worker contradicted.", lambda r: r.refused_entries),
    ("num_preemptions", "Sequences that lost their blocks.", lambda r: r.num_preemptions),
    ("resets", "Resets sent.", lambda r: r.num_resets),
    ("plans_refused", "Plans that the worker refused.", lambda r: r.num_nacks),
    ("steps_failed", "Steps that failed on the worker.", lambda r: r.num_step_failures),
    ("steps", "Steps confirmed.", lambda r: r.num_steps),
    ("wasted_steps", "Steps that computed nothing for anybody.", lambda r: r.wasted_steps),
    ("wasted_rows", "Rows of steps that came after their end.", lambda r: r.wasted_rows),
    ("device_time_seconds", "Time of confirmed steps.", lambda r: r.device_time_us / 1e6),
    ("replayed_tokens", "Tokens computed again by replays.", lambda r: r.replayed_tokens),
    ("plans", "Plans sent.", lambda r: r.plans_sent),
    ("plan_bytes", "Bytes of those plans.", lambda r: r.plan_bytes),
    ("replica_generation_tokens", "Output tokens of the replica.", lambda r: r.generation_tokens),
)
