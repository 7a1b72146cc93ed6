from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from data_plane import row_state as rs
from data_plane.block_table import BlockTable
from data_plane.input_batch import InputBatch
from data_plane.row_state import RowState
from data_plane.step_work import BlockCopies, Forks, NewRow, RowSampling, StepWork

BLOCK_SIZE = 16
NO_IDS = np.empty(0, np.int32)


def _ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _new_row(row: int, num_known: int, *, num_computed: int = 0, block_ids=()) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.arange(num_known, dtype=np.int32),
        num_prompt_tokens=num_known,
        sequence_index=0,
        seed=1,
        sampling=RowSampling(),
        eos_token_ids=NO_IDS,
        max_total_tokens=100,
        block_ids=_ids(*block_ids),
        num_hit_blocks=0,
        num_computed_tokens=num_computed,
    )


def _work(
    columns: list[tuple[int, int, int, bool, bool]],
    chunk_token_ids: np.ndarray = NO_IDS,
    forks: Forks | None = None,
) -> StepWork:
    """Columns are (row, number of new tokens, start, samples, is_decode)."""
    rows, counts, starts, samples, is_decode = (
        zip(*columns, strict=True) if columns else ((), (), (), (), ())
    )
    return StepWork(
        version=1,
        step=0,
        is_last_step=True,
        removed_rows=NO_IDS,
        added=(),
        forks=forks or Forks(),
        copies=BlockCopies(),
        appended_rows=NO_IDS,
        appended_counts=NO_IDS,
        appended_block_ids=NO_IDS,
        handed_out=NO_IDS,
        rows=_ids(*rows),
        num_new_tokens=_ids(*counts),
        start_positions=np.array(starts, np.int64),
        samples=np.array(samples, np.bool_),
        is_decode=np.array(is_decode, np.bool_),
        chunk_token_ids=chunk_token_ids,
    )


@dataclass
class Parts:
    table: BlockTable
    state: RowState
    batch: InputBatch


def _parts(device: str = "cpu", **kwargs: object) -> Parts:
    """Rows 1 and 3 decode at positions 20 and 7, row 2 is in prefill at position 5."""
    where = torch.device(device)
    table = BlockTable(max_num_seqs=6, max_blocks_per_seq=8, num_blocks=50, device=where)
    state = RowState(max_num_seqs=6, device=where)
    batch = InputBatch(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        device=where,
        block_table=table,
        row_state=state,
        **kwargs,  # pyright: ignore
    )
    added = (
        _new_row(1, 20, num_computed=20, block_ids=(11, 12)),
        _new_row(2, 9, num_computed=5, block_ids=(21,)),
        _new_row(3, 7, num_computed=7, block_ids=(31,)),
    )
    for new_row in added:
        table.add_row(new_row.row, new_row.block_ids)
    table.commit()
    state.add(added)
    state.words[1, rs.LAST_TOKEN] = 1001
    state.words[3, rs.LAST_TOKEN] = 1003
    return Parts(table, state, batch)


DECODES = [(1, 1, 20, True, True), (3, 1, 7, True, True)]


def test_decode_inputs_come_from_the_rows_on_the_device() -> None:
    inputs, kept = _parts().batch.prepare(_work(DECODES))
    assert inputs is not None
    assert kept is None
    assert inputs.rows.tolist() == [1, 3]
    assert inputs.token_ids.tolist() == [1001, 1003]
    assert inputs.lengths.tolist() == [21, 8]
    assert inputs.logits_rows.tolist() == [0, 1]
    assert inputs.sample_reqs is None
    attention = inputs.attention
    assert attention.positions.tolist() == [20, 7]
    assert attention.positions.dtype == torch.int64
    assert attention.slot_mapping.tolist() == [12 * 16 + 4, 31 * 16 + 7]
    assert attention.seq_lens.tolist() == attention.seq_lens_host.tolist() == [21, 8]
    assert attention.query_start_loc.tolist() == [0, 1, 2]
    assert attention.query_start_loc_host.tolist() == [0, 1, 2]
    assert attention.block_tables.tolist() == [[11, 12], [31, 0]]
    assert (attention.max_query_len, attention.max_seq_len, attention.num_tokens) == (1, 21, 2)


def test_mixed_step_merges_chunks_with_last_tokens() -> None:
    work = _work([DECODES[0], (2, 4, 5, True, False), DECODES[1]], _ids(5, 6, 7, 8))
    inputs, _ = _parts().batch.prepare(work)
    assert inputs is not None
    assert inputs.token_ids.tolist() == [1001, 5, 6, 7, 8, 1003]
    assert inputs.attention.positions.tolist() == [20, 5, 6, 7, 8, 7]
    assert inputs.attention.query_start_loc.tolist() == [0, 1, 5, 6]
    assert inputs.attention.slot_mapping.tolist() == [196, 341, 342, 343, 344, 503]
    assert inputs.attention.seq_lens.tolist() == [21, 9, 8]
    assert inputs.attention.max_query_len == 4
    assert inputs.logits_rows.tolist() == [0, 4, 5]
    assert inputs.sample_reqs is not None
    assert inputs.sample_reqs.tolist() == [0, 1, 2]


def test_chunk_that_does_not_end_the_prompt_has_no_logits() -> None:
    work = _work([DECODES[0], (2, 3, 5, False, False)], _ids(5, 6, 7))
    inputs, _ = _parts().batch.prepare(work)
    assert inputs is not None
    assert inputs.logits_rows.tolist() == [0]
    assert inputs.sample_reqs is not None
    assert inputs.sample_reqs.tolist() == [0]
    assert inputs.lengths.tolist() == [21, 8]


def test_padding_reads_the_null_block_and_writes_nowhere() -> None:
    inputs, _ = _parts(decode_sizes=(1, 4)).batch.prepare(_work(DECODES))
    assert inputs is not None
    assert inputs.rows.tolist() == [1, 3, 6, 6]
    assert inputs.is_live.tolist() == [True, True, False, False]
    attention = inputs.attention
    assert attention.slot_mapping.tolist()[2:] == [-1, -1]
    assert attention.seq_lens.tolist() == attention.seq_lens_host.tolist() == [21, 8, 0, 0]
    assert not attention.block_tables[2:].any()
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("skip_inactive", [False, True])
def test_stopped_row_is_masked_or_left_out(skip_inactive: bool) -> None:
    parts = _parts(skip_inactive=skip_inactive)
    parts.state.words[1, rs.ACTIVE] = 0
    work = _work([DECODES[0], (2, 2, 5, False, False), DECODES[1]], _ids(5, 6))
    inputs, kept = parts.batch.prepare(work)
    assert inputs is not None
    if skip_inactive:
        assert kept is not None
        assert kept.tolist() == [False, True, True]
        assert inputs.token_ids.tolist() == [5, 6, 1003]
        assert inputs.is_live.all()
    else:
        assert kept is None
        assert inputs.is_live.tolist() == [False, True, True]
        assert inputs.attention.slot_mapping.tolist()[0] == -1
        assert inputs.attention.seq_lens.tolist() == [0, 7, 8]


def test_nothing_is_prepared_when_all_rows_have_stopped() -> None:
    parts = _parts(skip_inactive=True)
    parts.state.stop_all()
    inputs, kept = parts.batch.prepare(_work(DECODES))
    assert inputs is None
    assert kept is not None
    assert kept.tolist() == [False, False]


@pytest.mark.parametrize("child", [0, 5])
def test_forked_child_has_no_tokens_and_its_parents_logits(child: int) -> None:
    forks = Forks(
        parent_rows=_ids(2),
        child_rows=_ids(child),
        sequence_indices=_ids(1),
        token_ids=_ids(-1),
        shares_logits=np.array([True]),
    )
    parts = _parts()
    parts.table.copy_row(2, child)
    parts.state.fork(forks)
    columns = [DECODES[0], (2, 4, 5, True, False), (child, 0, 9, True, False)]
    inputs, _ = parts.batch.prepare(_work(sorted(columns), _ids(5, 6, 7, 8), forks))
    assert inputs is not None
    order = inputs.rows.tolist()
    at = order.index(child)
    starts = inputs.attention.query_start_loc.tolist()
    assert starts[at] == starts[at + 1]
    assert inputs.lengths.tolist()[at] == inputs.lengths.tolist()[order.index(2)] == 9
    assert inputs.logits_rows.tolist()[at] == inputs.logits_rows.tolist()[order.index(2)] == 4


def test_host_numbers_are_those_of_the_device() -> None:
    work = _work([DECODES[0], (2, 4, 5, True, False), DECODES[1]], _ids(5, 6, 7, 8))
    for some in (_work(DECODES), work):
        inputs, _ = _parts(decode_sizes=(4,)).batch.prepare(some)
        assert inputs is not None
        attention = inputs.attention
        assert attention.seq_lens.tolist() == attention.seq_lens_host.tolist()
        assert attention.query_start_loc.tolist() == attention.query_start_loc_host.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_on_the_way_to_a_step_waits_for_the_gpu() -> None:
    parts = _parts("cuda", decode_sizes=(4,))
    mixed = _work([DECODES[0], (2, 4, 5, True, False), DECODES[1]], _ids(5, 6, 7, 8))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):  # round the staging rings several times
            parts.table.clear_row(4)
            parts.table.add_row(4, _ids(41, 42))
            parts.table.commit()
            parts.state.add((_new_row(4, 9),))
            parts.batch.prepare(mixed)
            decode, _ = parts.batch.prepare(_work(DECODES))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decode is not None
    assert decode.token_ids.tolist()[:2] == [1001, 1003]
    assert decode.attention.slot_mapping.tolist() == [196, 503, -1, -1]
    assert parts.table.device_table[4, :2].tolist() == [41, 42]
