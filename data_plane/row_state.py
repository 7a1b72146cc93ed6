"""Persistent device state of every row: where its sequence is, how it samples, when it stops.

Owns: the layout of that state, and the changes that plans make to it. Steps read it through row
indices and write it back on the device; the host keeps only what it needs to choose between
code paths. Does not know blocks or tokens other than the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.staging import StagingRing
from data_plane.step_work import StepError
from kernels.row_layout import RowLayout

if TYPE_CHECKING:
    from data_plane.step_work import BoolArray, Forks, Int32Array, NewRow

# A request may name 256 stop tokens; the others are EOS tokens of the model.
MAX_STOP_IDS = 272

# Columns of `RowState.words`. A step writes the first three.
LAST_TOKEN = 0  # the next input of a decoding row
LENGTH = 1  # tokens whose KV is in the cache
ACTIVE = 2  # 0: stopped on the device, computes and writes nothing
MIN_TOTAL = 3  # prompt + min_tokens: EOS and stop ids are masked below this many tokens
MAX_TOTAL = 4  # tokens at which the row ends with LENGTH
SEQUENCE_INDEX = 5
TOP_K = 6
TEMPERATURE = 7  # float32 bits, as the two below
TOP_P = 8
MIN_P = 9
SEED = 10  # two words, one int64, aligned
NUM_WORDS = 16

NUM_STEP_WORDS = 3  # what a step writes back

LAYOUT = RowLayout(
    last_token=LAST_TOKEN,
    length=LENGTH,
    active=ACTIVE,
    min_total=MIN_TOTAL,
    max_total=MAX_TOTAL,
    sequence_index=SEQUENCE_INDEX,
    top_k=TOP_K,
    temperature=TEMPERATURE,
    top_p=TOP_P,
    min_p=MIN_P,
    seed=SEED,
)


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """State of some rows as columns, gathered at the start of a step.

    Attributes:
        words: [n, NUM_WORDS] int32, a copy.
    """

    words: torch.Tensor

    def column(self, index: int) -> torch.Tensor:
        """[n] int32."""
        return self.words[:, index]

    def float_column(self, index: int) -> torch.Tensor:
        """[n] float32."""
        return self.words.view(torch.float32)[:, index]

    @property
    def seeds(self) -> torch.Tensor:
        """[n] int64, the bits of the uint64 seed."""
        return self.words.view(torch.int64)[:, SEED // 2]

    def select(self, index: torch.Tensor) -> GatheredRows:
        """The rows at `index`, [m] int32."""
        return GatheredRows(self.words.index_select(0, index))


class RowState:
    """State of `max_num_seqs` rows, and of one more that belongs to no sequence: padding.

    Attributes:
        words: [max_num_seqs + 1, NUM_WORDS] int32, columns as named above.
        stop_ids: [max_num_seqs + 1, MAX_STOP_IDS] int32, used entries first, -1 where unused: ids
            that end the row, and, as -2 - id, EOS ids that ignore_eos disarmed.
        min_total: [max_num_seqs] int32 on the host, as the column.
        num_ids: [max_num_seqs] int32 on the host, used entries of stop_ids.
        has_filter: [max_num_seqs] bool on the host: the row draws with top_k, top_p or min_p.
    """

    def __init__(self, *, max_num_seqs: int, device: torch.device, num_slots: int = 4) -> None:
        self.padding_row = max_num_seqs
        self.words = torch.zeros((max_num_seqs + 1, NUM_WORDS), dtype=torch.int32, device=device)
        self.stop_ids = torch.full(
            (max_num_seqs + 1, MAX_STOP_IDS), -1, dtype=torch.int32, device=device
        )
        self.min_total: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_ids: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.has_filter: BoolArray = np.zeros(max_num_seqs, np.bool_)
        # Room for all rows at once: growing would allocate on the way of a step.
        self._staging = StagingRing(
            num_slots=num_slots,
            num_words=max_num_seqs * (NUM_WORDS + MAX_STOP_IDS + 4) + 16,
            device=device,
        )
        # On the CPU the device's flags are host memory.
        self._words_host: Int32Array | None = self.words.numpy() if device.type == "cpu" else None

    def add(self, new_rows: tuple[NewRow, ...]) -> None:
        """Start sequences; the rows become active.

        Raises:
            StepError: a row names more stop tokens than fit.
        """
        if not new_rows:
            return
        rows = np.array([new_row.row for new_row in new_rows], np.int32)
        words = np.zeros((len(new_rows), NUM_WORDS), np.int32)
        stop_ids = np.full((len(new_rows), MAX_STOP_IDS), -1, np.int32)
        for i, new_row in enumerate(new_rows):
            _fill_words(words[i], stop_ids[i], new_row)
            self.num_ids[new_row.row] = np.count_nonzero(stop_ids[i] != -1)
            sampling = new_row.sampling
            self.has_filter[new_row.row] = sampling.temperature > 0 and bool(
                sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
            )
        self.min_total[rows] = words[:, MIN_TOTAL]
        index, device_words, device_ids = self._staging.upload(rows, words, stop_ids)
        index = index.long()
        self.words.index_copy_(0, index, device_words.view(-1, NUM_WORDS))
        self.stop_ids.index_copy_(0, index, device_ids.view(-1, MAX_STOP_IDS))

    def fork(self, forks: Forks) -> None:
        """Start children as copies of their parents, with their own key of draws."""
        if not forks.child_rows.size:
            return
        for host_column in (self.min_total, self.num_ids, self.has_filter):
            host_column[forks.child_rows] = host_column[forks.parent_rows]
        parents, children, indices, tokens = self._staging.upload(
            forks.parent_rows, forks.child_rows, forks.sequence_indices, forks.token_ids
        )
        words = self.words.index_select(0, parents)
        is_given = tokens >= 0
        words[:, SEQUENCE_INDEX] = indices
        words[:, LAST_TOKEN] = torch.where(is_given, tokens, words[:, LAST_TOKEN])
        # A parent that stopped hands its stop down, but not to a beam that goes on elsewhere.
        words[:, ACTIVE] |= is_given
        child_index = children.long()
        self.words.index_copy_(0, child_index, words)
        self.stop_ids.index_copy_(0, child_index, self.stop_ids.index_select(0, parents))

    def stop_all(self) -> None:
        """Deactivate every row: whatever still names one writes nothing."""
        self.words[:, ACTIVE] = 0

    def gather(self, rows: torch.Tensor) -> GatheredRows:
        """State of `rows`, [n] int32."""
        return GatheredRows(self.words.index_select(0, rows))

    def write_back(self, rows: torch.Tensor, step_words: torch.Tensor) -> None:
        """Store last token, length and active flag: step_words is [n, NUM_STEP_WORDS] int32."""
        self.words[:, :NUM_STEP_WORDS].index_copy_(0, rows.long(), step_words)

    def are_active(self, rows: Int32Array) -> np.ndarray:
        """Which rows have not stopped on the device. Only where that is known without waiting.

        Raises:
            RuntimeError: the state is not in host memory.
        """
        if self._words_host is None:
            raise RuntimeError("active flags of a GPU are not read by the host")
        return self._words_host[rows, ACTIVE] != 0


def _fill_words(words: Int32Array, stop_ids: Int32Array, new_row: NewRow) -> None:
    sampling = new_row.sampling
    ids = list(dict.fromkeys((*sampling.stop_token_ids, *new_row.eos_token_ids.tolist())))
    if sampling.ignore_eos:
        # They end nothing, but below min_tokens they may not come either.
        ids = [i if i in sampling.stop_token_ids else -2 - i for i in ids]
    if len(ids) > MAX_STOP_IDS:
        raise StepError(
            f"row {new_row.row} has {len(ids)} stop and EOS token ids, at most {MAX_STOP_IDS} fit",
            reason="TOO_MANY_STOP_IDS",
            code=3,
        )
    stop_ids[: len(ids)] = ids
    words[LENGTH] = new_row.num_computed_tokens
    words[ACTIVE] = 1
    words[MIN_TOTAL] = min(new_row.num_prompt_tokens + sampling.min_tokens, np.iinfo(np.int32).max)
    words[MAX_TOTAL] = new_row.max_total_tokens
    words[SEQUENCE_INDEX] = new_row.sequence_index
    words[TOP_K] = sampling.top_k
    floats = words.view(np.float32)
    floats[TEMPERATURE] = sampling.temperature
    floats[TOP_P] = sampling.top_p
    floats[MIN_P] = sampling.min_p
    words.view(np.uint64)[SEED // 2] = new_row.seed
