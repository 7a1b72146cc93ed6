"""Sizes that steps are padded to."""

from __future__ import annotations

import pytest

from data_plane.cuda_graphs import decode_buckets, token_buckets


def test_decode_buckets_grow_with_the_batch() -> None:
    sizes = decode_buckets(1024)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert {248, 256, 272, 496, 512, 576, 960, 1024} <= set(sizes)
    assert not {264, 520, 528} & set(sizes)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 250, 256, 257, 300, 513, 2000])
def test_every_number_of_rows_has_a_bucket(max_num_seqs: int) -> None:
    sizes = decode_buckets(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert list(sizes) == sorted(set(sizes))


def test_token_buckets_end_at_what_a_step_may_compute() -> None:
    assert token_buckets(8192) == (16, 32, 64, 128, 256, 512, 1024)
    assert token_buckets(200) == (16, 32, 64, 128)
    assert token_buckets(8) == ()
