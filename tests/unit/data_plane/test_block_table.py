from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.block_table import BlockTable

NUM_BLOCKS = 10_000


def _ids(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, np.int32)


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def table(request: pytest.FixtureRequest) -> BlockTable:
    return BlockTable(
        max_num_seqs=4,
        max_blocks_per_seq=512,
        num_blocks=NUM_BLOCKS,
        device=torch.device(request.param),
        num_slots=2,
    )


def _row(table: BlockTable, row: int, count: int) -> list[int]:
    return table.device_table[row, :count].tolist()


def test_nothing_reaches_the_device_before_commit(table: BlockTable) -> None:
    table.add_row(1, _ids(5, 6))
    assert _row(table, 1, 2) == [0, 0]
    table.commit()
    assert _row(table, 1, 3) == [5, 6, 0]


def test_append_goes_behind_what_the_row_has(table: BlockTable) -> None:
    table.add_row(2, _ids(5, 6))
    table.append_row(2, _ids(7))
    table.commit()
    table.append_row(2, _ids(8, 9))
    table.commit()
    assert _row(table, 2, 5) == [5, 6, 7, 8, 9]
    assert table.row_block_ids(2).tolist() == [5, 6, 7, 8, 9]


def test_copied_row_goes_its_own_way(table: BlockTable) -> None:
    table.add_row(0, _ids(1, 2, 3))
    table.copy_row(0, 3)
    table.set_entry(3, 2, 9)
    table.append_row(3, _ids(10))
    table.append_row(0, _ids(4))
    table.commit()
    assert _row(table, 0, 4) == [1, 2, 3, 4]
    assert _row(table, 3, 4) == [1, 2, 9, 10]


def test_row_is_cleared_and_added_again_in_one_commit(table: BlockTable) -> None:
    table.add_row(0, _ids(1, 2, 3))
    table.commit()
    table.append_row(0, _ids(4))
    table.clear_row(0)
    table.add_row(0, _ids(7, 8))
    table.commit()
    assert _row(table, 0, 2) == [7, 8]
    assert table.row_block_ids(0).tolist() == [7, 8]


def test_padding_row_names_the_null_block_only(table: BlockTable) -> None:
    for row in range(4):
        table.add_row(row, np.arange(1, 513, dtype=np.int32))
    table.commit()
    assert not table.device_table[table.padding_row].any()


def test_bytes_committed_grow_with_the_change_and_not_with_the_table(table: BlockTable) -> None:
    table.add_row(0, np.arange(1, 501, dtype=np.int32))
    table.commit()
    after_add = table.bytes_committed
    assert 500 * 4 <= after_add <= 500 * 4 + 64
    table.append_row(0, _ids(600))
    table.commit()
    assert table.bytes_committed - after_add <= 32
    table.commit()
    table.clear_row(0)
    table.commit()
    assert table.bytes_committed - after_add <= 32


def test_many_commits_in_flight_all_arrive(table: BlockTable) -> None:
    # More commits than staging slots, none waited for.
    for i in range(500):
        table.append_row(i % 4, _ids(1 + i))
        table.commit()
    for row in range(4):
        assert _row(table, row, 125) == list(range(1 + row, 501, 4))


def test_delta_larger_than_the_staging_buffer_arrives(table: BlockTable) -> None:
    wide = BlockTable(
        max_num_seqs=64,
        max_blocks_per_seq=512,
        num_blocks=NUM_BLOCKS,
        device=table.device_table.device,
    )
    ids = np.arange(1, 513, dtype=np.int32)
    for row in range(64):
        wide.add_row(row, ids)
    wide.commit()
    assert (wide.device_table[:64].cpu() == torch.from_numpy(ids)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.append_row(4, _ids(1)), r"row 4 is not in \[0, 4\)"),
        (lambda table: table.append_row(0, _ids(0)), "null block"),
        (lambda table: table.append_row(0, _ids(NUM_BLOCKS)), "block ids 10000 to 10000"),
        (lambda table: table.append_row(0, np.ones(512, np.int32)), "would have 513 blocks"),
        (lambda table: table.set_entry(0, 1, 3), "no entry 1"),
    ],
)
def test_impossible_change_is_refused_and_changes_nothing(
    table: BlockTable, change, message: str
) -> None:
    table.add_row(0, _ids(1))
    with pytest.raises(ValueError, match=message):
        change(table)
    table.commit()
    assert table.row_block_ids(0).tolist() == [1]
    assert _row(table, 0, 2) == [1, 0]
