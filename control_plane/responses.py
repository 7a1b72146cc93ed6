"""What the engine side knows, in the messages of the public API.

Owns: the mapping of names. Does not know: calls, order, text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from google.protobuf.timestamp_pb2 import Timestamp

from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.generation import Update
    from control_plane.stats import ClusterSnapshot, ReplicaSnapshot


def to_outputs(updates: Iterable[Update]) -> list[inference_pb2.SequenceOutput]:
    """Updates as the API has them."""
    outputs: list[inference_pb2.SequenceOutput] = []
    for update in updates:
        output = inference_pb2.SequenceOutput(
            index=update.index, text="".join(update.texts), token_ids=update.token_ids
        )
        if update.finish_reason is not None:
            # One numbering: the core's enumeration is the wire's.
            output.finish_reason = cast("inference_pb2.FinishReason", int(update.finish_reason))
        if update.stop_string is not None:
            output.stop_string = update.stop_string
        elif update.stop_token_id is not None:
            output.stop_token_id = update.stop_token_id
        outputs.append(output)
    return outputs


# Names are the same on both sides; what a snapshot has beyond the API is for metrics.
_REPLICA_FIELDS = tuple(
    field.name for field in inference_pb2.ReplicaStats.DESCRIPTOR.fields if field.name != "workers"
)
_WORKER_FIELDS = tuple(field.name for field in inference_pb2.WorkerStats.DESCRIPTOR.fields)


def _replica_stats(replica: ReplicaSnapshot) -> inference_pb2.ReplicaStats:
    return inference_pb2.ReplicaStats(
        workers=[
            inference_pb2.WorkerStats(**{name: getattr(worker, name) for name in _WORKER_FIELDS})
            for worker in replica.workers
        ],
        **{name: getattr(replica, name) for name in _REPLICA_FIELDS},
    )


def to_stats(snapshot: ClusterSnapshot) -> inference_pb2.GetStatsResponse:
    """A snapshot as the API has it."""
    started_at = Timestamp()
    started_at.FromNanoseconds(int(snapshot.started_at_s * 1e9))
    return inference_pb2.GetStatsResponse(
        replicas=[_replica_stats(replica) for replica in snapshot.replicas],
        num_requests_unplaced=snapshot.num_requests_unplaced,
        term=snapshot.term,
        started_at=started_at,
        prefix_store=snapshot.prefix_store,
    )
