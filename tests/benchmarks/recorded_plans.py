"""Plans of a workload, made beforehand: what a control plane would order if nothing ever stopped.

Every request generates exactly as many tokens as it asks for, so the plans do not depend on what
the model says, and a worker can be measured alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from control_plane.block_hash import BlockHasher
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.plan import encode_plan
from control_plane.request import FinishReason, Request, SamplingParams, Version
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from control_plane.scheduled_step import ScheduledStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the worker that will run the plans."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(slots=True)
class RecordedPlans:
    """A workload as messages.

    Attributes:
        plans: Serialized Plan messages; base version 0.
        sampled: Per plan, the index of the request of each sampled row.
        num_tokens: Per plan, tokens computed.
    """

    plans: list[bytes] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)


def record(
    prompts: list[list[int]],
    max_tokens: list[int],
    limits: Limits,
    *,
    lookahead: int,
    temperature: float = 0.6,
) -> RecordedPlans:
    """Schedule a workload against a worker that answers every step, `lookahead` steps late."""
    manager = KVCacheManager(
        KVCacheConfig(
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            enable_prefix_caching=False,
        ),
        BlockHasher(
            deployment_seed=b"bench", model_fingerprint=bytes(32), block_size=limits.block_size
        ),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    config = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    scheduler = Scheduler(config, manager)
    for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        scheduler.add(
            Request(
                req_id=f"r{index}",
                prompt_token_ids=np.array(prompt, np.int32),
                sampling=SamplingParams(
                    max_tokens=count, temperature=temperature, ignore_eos=True, seed=index
                ),
                seed=index,
                max_total_tokens=len(prompt) + count,
                arrival=index,
            )
        )
    recorded = RecordedPlans()
    in_flight: deque[tuple[ScheduledStep, list[int]]] = deque()
    owner: dict[int, int] = {}  # row -> request, as of the last plan
    done = [0] * len(prompts)
    version = 0
    while scheduler.has_work:
        step = scheduler.schedule(Version(version + 1))
        if step is not None:
            version += 1
            for added in step.added:
                owner[added.row] = added.sequence.request.arrival
            sampled = [owner[row] for row in step.sampled_rows.tolist()]
            in_flight.append((step, sampled))
            recorded.plans.append(encode_plan(step).SerializeToString())
            recorded.num_tokens.append(step.num_tokens)
            recorded.sampled.append(sampled)
        if in_flight and (step is None or len(in_flight) > lookahead):
            _answer(scheduler, *in_flight.popleft(), done, max_tokens)
    return recorded


def _answer(
    scheduler: Scheduler,
    step: ScheduledStep,
    sampled: list[int],
    done: list[int],
    max_tokens: list[int],
) -> None:
    finished: list[int] = []
    counts = np.ones(step.sampled_rows.size, np.uint8)
    for column, (row, index) in enumerate(zip(step.sampled_rows.tolist(), sampled, strict=True)):
        if done[index] == max_tokens[index]:
            counts[column] = 0
            continue
        done[index] += 1
        if done[index] == max_tokens[index]:
            finished.append(row)
    scheduler.update(
        step.version,
        0,
        counts,
        np.ones(int(counts.sum()), np.int32),
        np.array(finished, np.int32),
        np.full(len(finished), FinishReason.LENGTH, np.uint8),
    )
