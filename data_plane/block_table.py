"""The device's block table: which physical blocks hold the tokens of each row.

Owns: the device table, its mirror on the host, and the delta between them. Does not know who
decides about blocks (the control plane), what is in them, or which rows run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.staging import StagingRing

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.step_work import Int32Array

_INITIAL_STAGING_WORDS = 1 << 14


class BlockTable:
    """Block ids per row. Changes are staged on the host; `commit` copies the changes alone.

    Attributes:
        device_table: [max_num_seqs + 1, max_blocks_per_seq] int32. Entries past a row's blocks are
            left over from an earlier sequence: readable, and masked by its length. The last row
            belongs to no sequence: padding points to it and it names the null block only.
        padding_row: Index of that last row.
        bytes_committed: Bytes of all deltas copied so far.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        device: torch.device,
        num_slots: int = 4,
    ) -> None:
        self.padding_row = max_num_seqs
        self.bytes_committed = 0
        self.device_table = torch.zeros(
            (max_num_seqs + 1, max_blocks_per_seq), dtype=torch.int32, device=device
        )
        self._num_blocks = num_blocks
        self._mirror: Int32Array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self._lengths: Int32Array = np.zeros(max_num_seqs, np.int32)
        # (row, first column, number of entries) that differ from the device. Their ids are read
        # from the mirror at commit, so segments that overlap agree and order does not matter.
        self._segments: list[tuple[int, int, int]] = []
        self._staging = StagingRing(
            num_slots=num_slots, num_words=_INITIAL_STAGING_WORDS, device=device
        )
        self._apply_delta = _select_op(device)

    def row_block_ids(self, row: int) -> Int32Array:
        """The row's blocks, staged changes included; borrowed until the next change."""
        return self._mirror[row, : self._lengths[row]]

    def add_row(self, row: int, block_ids: Int32Array) -> None:
        """Make `block_ids` the whole table of `row`."""
        self._check_row(row)
        self._lengths[row] = 0
        self.append_row(row, block_ids)

    def append_row(self, row: int, block_ids: Int32Array) -> None:
        """Add `block_ids` behind the row's last block.

        Raises:
            ValueError: the row or an id is out of range, or the row would be too long; nothing
                has changed.
        """
        self._check_row(row)
        self._check_ids(block_ids)
        first = int(self._lengths[row])
        end = first + block_ids.size
        if end > self._mirror.shape[1]:
            raise ValueError(
                f"row {row} would have {end} blocks, at most {self._mirror.shape[1]} fit"
            )
        self._mirror[row, first:end] = block_ids
        self._lengths[row] = end
        if block_ids.size:
            self._segments.append((row, first, block_ids.size))

    def set_entry(self, row: int, index: int, block_id: int) -> None:
        """Replace one block of a row: the copy that it may write.

        Raises:
            ValueError: the row has no such entry, or the id is out of range.
        """
        self._check_row(row)
        if not 0 <= index < self._lengths[row]:
            raise ValueError(f"row {row} has {self._lengths[row]} blocks, no entry {index}")
        self._check_ids(np.array([block_id], np.int32))
        self._mirror[row, index] = block_id
        self._segments.append((row, index, 1))

    def copy_row(self, src_row: int, dst_row: int) -> None:
        """Make the table of `dst_row` a copy of that of `src_row`, staged changes included."""
        self._check_row(src_row)
        self.add_row(dst_row, self.row_block_ids(src_row).copy())

    def clear_row(self, row: int) -> None:
        """Forget the row's blocks. Nothing is copied: no step reads the row until it is added."""
        self._check_row(row)
        self._lengths[row] = 0
        self._segments = [segment for segment in self._segments if segment[0] != row]

    def clear(self) -> None:
        """Forget the blocks of all rows."""
        self._lengths[:] = 0
        self._segments.clear()

    def commit(self) -> None:
        """Copy what was staged since the last commit, and nothing else, into the device table."""
        if not self._segments:
            return
        segments = np.array(self._segments, np.int32)
        rows, first_columns, counts = segments.T
        id_offsets = np.zeros(len(segments) + 1, np.int32)
        np.cumsum(counts, out=id_offsets[1:])
        block_ids = np.concatenate(
            [self._mirror[row, first : first + count] for row, first, count in self._segments]
        )
        self._segments.clear()
        delta = (rows, first_columns, id_offsets, block_ids)
        self.bytes_committed += sum(column.nbytes for column in delta)
        self._apply_delta(self.device_table, *self._staging.upload(*delta))

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.padding_row:
            raise ValueError(f"row {row} is not in [0, {self.padding_row})")

    def _check_ids(self, block_ids: Int32Array) -> None:
        if block_ids.size and not (block_ids.min() > 0 and block_ids.max() < self._num_blocks):
            raise ValueError(
                f"block ids {block_ids.min()} to {block_ids.max()} are not all in "
                f"[1, {self._num_blocks}); block 0 is the null block"
            )


def _select_op(device: torch.device) -> Callable[..., None]:
    # Imported where it is chosen: a worker without a GPU needs no triton.
    if device.type == "cuda":
        from kernels.apply_block_table_delta import apply_block_table_delta

        return apply_block_table_delta
    from kernels.reference import apply_block_table_delta_ref

    return apply_block_table_delta_ref
