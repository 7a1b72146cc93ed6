"""Small host arrays on their way to the device: one copy per call, never waited for.

Owns: pinned host buffers and the device memory they are copied to. Does not know what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_WORD = 4  # bytes
_ALIGNMENT = 16  # bytes, of every array within a buffer


class _HostBuffer:
    __slots__ = ("array", "copied", "tensor")

    def __init__(self, num_words: int, *, pinned: bool) -> None:
        self.tensor = torch.empty(num_words, dtype=torch.int32, pin_memory=pinned)
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()
        # Recorded behind the copy out of this buffer; None: nothing is under way.
        self.copied: torch.cuda.Event | None = None


class StagingRing:
    """Uploads int32 arrays in one asynchronous copy per call.

    A ring of pinned host buffers: one is written again only after the event recorded behind its
    copy. There is one device buffer: the next copy into it is ordered behind the kernels that read
    the last one, so its address never changes under a captured graph unless it has to grow. On the
    CPU the host buffer is the device buffer and each call overwrites the one before, which has run.
    """

    def __init__(self, *, num_slots: int, num_words: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._num_slots = num_slots if self._is_cuda else 1
        self._allocate(num_words)

    def _allocate(self, num_words: int) -> None:
        step = _ALIGNMENT // _WORD
        self._num_words = -(-num_words // step) * step
        self._slots = [
            _HostBuffer(self._num_words, pinned=self._is_cuda) for _ in range(self._num_slots)
        ]
        self._next = 0
        self._device_buffer = (
            torch.empty(self._num_words, dtype=torch.int32, device=self._device)
            if self._is_cuda
            else self._slots[0].tensor
        )

    @property
    def device_buffer(self) -> torch.Tensor:
        """[num_words] int32, where every upload begins; its address stays unless it has to grow."""
        return self._device_buffer

    def views(self, *sizes: int) -> list[torch.Tensor]:
        """Give the tensors that `upload` of arrays of these sizes gives, without copying."""
        step = _ALIGNMENT // _WORD
        views: list[torch.Tensor] = []
        start = 0
        for size in sizes:
            views.append(self._device_buffer[start : start + size])
            start += -(-size // step) * step
        return views

    def upload(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Give each array as an int32 tensor on the device, flattened.

        The tensors are borrowed until the next call. What is copied is rounded up to whole groups
        of 16 bytes per array.
        """
        step = _ALIGNMENT // _WORD
        starts: list[int] = []
        num_words = 0
        for array in arrays:
            starts.append(num_words)
            num_words += -(-array.size // step) * step
        if num_words > self._num_words:
            # Old buffers live on with whatever still copies from or reads them: the allocators of
            # pinned and of device memory follow the stream.
            self._allocate(max(num_words, 2 * self._num_words))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.copied is not None:
            slot.copied.synchronize()
        for start, array in zip(starts, arrays, strict=True):
            slot.array[start : start + array.size] = array.ravel()
        buffer = self._device_buffer
        if self._is_cuda:
            buffer[:num_words].copy_(slot.tensor[:num_words], non_blocking=True)
            if slot.copied is None:
                slot.copied = torch.cuda.Event()
            slot.copied.record()
        return [
            buffer[start : start + array.size] for start, array in zip(starts, arrays, strict=True)
        ]
