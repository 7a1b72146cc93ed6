"""A step that was ordered on the device, and the way of its results back to the host.

Owns: the layout of packed results, the host memory they land in, and the one wait for them. Does
not know how they came about.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.step_work import StepError, StepOutput

if TYPE_CHECKING:
    from collections import deque

    from data_plane.step_work import BoolArray, Int32Array

logger = logging.getLogger(__name__)

# A result is two words: the token id; the number of tokens produced and, above, the finish reason.
REASON_SHIFT = 8


class ResultSlot:
    """Host memory that one step's results are copied to."""

    __slots__ = ("array", "ended", "started", "tensor")

    def __init__(self, num_rows: int, *, is_cuda: bool) -> None:
        self.tensor = torch.empty((num_rows, 2), dtype=torch.int32, pin_memory=is_cuda)
        self.array: Int32Array = self.tensor.numpy()
        self.started = torch.cuda.Event(enable_timing=True) if is_cuda else None
        # The result thread sleeps on it: a core that spins there is missing elsewhere.
        self.ended = torch.cuda.Event(enable_timing=True, blocking=True) if is_cuda else None


class DeviceStep:
    """A step that was ordered. Waited for once, from any thread."""

    def __init__(
        self,
        *,
        sampled_rows: Int32Array,
        kept: BoolArray | None,
        slot: ResultSlot,
        pool: deque[ResultSlot],
        host_time_us: int,
    ) -> None:
        self._sampled_rows = sampled_rows
        self._kept = kept
        self._slot = slot
        self._pool = pool
        self._host_time_us = host_time_us

    def wait(self) -> StepOutput:
        """Block until the results are on the host.

        Raises:
            StepError: the step failed on the device.
        """
        slot, device_time_us = self._slot, self._host_time_us
        if slot.started is not None and slot.ended is not None:
            try:
                slot.ended.synchronize()
                device_time_us = round(slot.started.elapsed_time(slot.ended) * 1000)
            except RuntimeError as error:
                raise as_step_error(error) from error
        num_rows = self._sampled_rows.size
        if self._kept is None:
            results = slot.array[:num_rows].copy()
        else:
            results = np.zeros((num_rows, 2), np.int32)
            results[self._kept] = slot.array[: np.count_nonzero(self._kept)]
        self._pool.append(slot)
        counts = (results[:, 1] & 0xFF).astype(np.uint8)
        reasons = (results[:, 1] >> REASON_SHIFT).astype(np.uint8)
        is_finished = reasons != 0
        return StepOutput(
            counts=counts,
            token_ids=results[counts != 0, 0],
            finished_rows=self._sampled_rows[is_finished],
            finish_reasons=reasons[is_finished],
            device_time_us=device_time_us,
        )


def as_step_error(error: RuntimeError) -> StepError:
    """What torch raised, as the control stream reports it."""
    logger.error("step failed: error=%r", error)
    if isinstance(error, torch.OutOfMemoryError):
        return StepError(str(error), reason="OUT_OF_MEMORY", code=8)
    # A device-side fault poisons the context: every later call would fail.
    return StepError(str(error), is_fatal=isinstance(error, torch.AcceleratorError))
