"""CUDA graphs of a step's parts, by key, in one memory pool.

Owns: captured graphs and the memory they share. Does not know what was captured.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending numbers of rows that steps are padded to; the last one is max_num_seqs.

    1, 2, 4, 8, then by 8 to 256, by 16 to 512, by 64 above: padding costs at most an eighth where
    steps are short and a sixteenth where they are long.
    """
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, max_num_seqs, 64))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Ascending numbers of tokens that steps with prefills are padded to; longer ones are not."""
    return tuple(
        size for size in (16, 32, 64, 128, 256, 512, 1024) if size <= max_num_batched_tokens
    )


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the whole process: cuBLAS keeps a workspace for every stream that it has seen.
    return torch.cuda.Stream(device)


class GraphSet:
    """Graphs that run one after the other, never two at once.

    They share their intermediate memory: what one leaves there is garbage to the next, so results
    go to buffers that were allocated before the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: Hashable, run: Callable[[], None]) -> None:
        """Capture `run`, which allocates on and orders work on the current stream only.

        It runs once before, so that nothing is compiled or loaded while capturing: it must do no
        harm. Capture what needs the most memory first.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> bool:
        """Order a captured graph on the current stream; False if there is none of that key."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        """Drop all graphs. None of them is running."""
        self._graphs.clear()
