"""A scheduler with small blocks and the shortest way to drive it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from control_plane.block_hash import BlockHasher
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.request import FinishReason, Request, SamplingParams, Version
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from control_plane.scheduled_step import ScheduledStep, StepUpdate

BLOCK_SIZE = 4


class Driver:
    """A scheduler and the shortest way to drive it."""

    def __init__(
        self,
        *,
        num_blocks: int = 41,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_bypass: int = 0,
        watermark: float = 0.0,
        max_added_tokens: int = 1 << 22,
    ) -> None:
        manager = KVCacheManager(
            KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, watermark=watermark),
            BlockHasher(deployment_seed=b"d", model_fingerprint=b"m", block_size=BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_model_len=64,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=64,
            max_bypass=max_bypass,
            max_added_tokens=max_added_tokens,
        )
        self.scheduler = Scheduler(config, manager)
        self.pool = manager.pool
        self.version = 0
        self.num_requests = 0

    def add(
        self, prompt: Iterable[int], *, max_tokens: int = 9, n: int = 1, **fields: object
    ) -> Request:
        prompt = list(prompt)
        request = Request(
            req_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(n=n),
            seed=0,
            max_total_tokens=len(prompt) + max_tokens,
            arrival=self.num_requests,
            **fields,  # type: ignore[arg-type]
        )
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def order(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(Version(self.version + 1))
        self.version += step is not None
        self.scheduler.audit()
        return step

    def must_order(self) -> ScheduledStep:
        step = self.order()
        assert step is not None
        return step

    def answer(
        self,
        step: ScheduledStep,
        finished: dict[int, FinishReason] | None = None,
        silent: Iterable[int] = (),
        token: int = 7,
    ) -> StepUpdate:
        rows = step.sampled_rows.tolist()
        finished = finished or {}
        counts = np.array([row not in silent for row in rows], dtype=np.uint8)
        update = self.scheduler.update(
            step.version,
            0,
            counts,
            np.full(int(counts.sum()), token, dtype=np.int32),
            np.array(sorted(finished), dtype=np.int32),
            np.array([finished[row] for row in sorted(finished)], dtype=np.uint8),
        )
        self.scheduler.audit()
        return update

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.answer(self.must_order())


def prompt(start: int, length: int) -> range:
    return range(start, start + length)
