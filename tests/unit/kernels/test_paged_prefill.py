from __future__ import annotations

import pytest
import torch
from paged_case import PagedCase, Shape

from kernels.attention_plan import max_prefill_tiles, plan_prefill
from kernels.paged_prefill import PrefillTiles, paged_prefill, prefill_tiles

SMALL = PrefillTiles(16, 16, 2, 4)


def _run(case: PagedCase, cut: PrefillTiles | None) -> None:
    shape = case.shape
    num_reqs = case.seq_lens.numel()
    query_tile = (cut or prefill_tiles(shape.head_size, shape.dtype)).query_tile
    num_tiles = max_prefill_tiles(case.query.shape[0], num_reqs, query_tile)
    tiles = torch.full((num_tiles, 2), -7, dtype=torch.int32, device=case.query.device)
    plan_prefill(case.query_start_loc, query_tile=query_tile, out=tiles)
    paged_prefill(
        case.query,
        case.query_start_loc,
        case.key_cache,
        case.value_cache,
        case.block_table,
        case.seq_lens,
        tiles,
        scale=shape.scale,
        rows=case.rows,
        soft_cap=shape.soft_cap,
        window=shape.window,
        out=case.out,
        cut=cut,
    )


def _check(case: PagedCase, cut: PrefillTiles | None = SMALL) -> None:
    _run(case, cut)
    case.check(case.tokens(single=False))


@pytest.mark.parametrize(
    ("query_lens", "history"),
    [
        ([2], [0]),
        ([15, 16, 17], [0, 0, 0]),
        ([33], [31]),
        ([5, 1, 40, 0, 30], [0, 3, 70, 5, 0]),
        ([2, 2, 2], [16, 15, 14]),
    ],
)
@pytest.mark.parametrize("block_size", [16, 32])
def test_prefill_equals_its_reference(
    query_lens: list[int], history: list[int], block_size: int, generator: torch.Generator
) -> None:
    seq_lens = [a + b for a, b in zip(query_lens, history, strict=True)]
    shape = Shape(block_size=block_size)
    _check(PagedCase(shape, query_lens, seq_lens, generator, num_padding=3))


@pytest.mark.parametrize("cut", [PrefillTiles(16, 32, 1, 4), PrefillTiles(32, 16, 3, 4)])
def test_prefill_equals_its_reference_however_it_is_cut(
    cut: PrefillTiles, generator: torch.Generator
) -> None:
    _check(PagedCase(Shape(), [20, 50], [75, 50], generator), cut)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_prefill_serves_any_group_size(group: int, generator: torch.Generator) -> None:
    _check(PagedCase(Shape(heads=group, kv_heads=1), [20], [35], generator))


@pytest.mark.parametrize("head_size", [16, 20, 64, 80, 96, 128, 256])
def test_prefill_serves_any_head_size(head_size: int, generator: torch.Generator) -> None:
    _check(PagedCase(Shape(head_size=head_size), [20], [35], generator))


def test_prefill_in_fp16(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(dtype=torch.float16), [20], [35], generator))


@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_prefill_reads_no_key_outside_the_window(window: int, generator: torch.Generator) -> None:
    _check(PagedCase(Shape(window=window), [40, 9, 20], [40, 60, 90], generator))


def test_prefill_caps_scores(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(soft_cap=0.7), [20], [35], generator))


def test_prefill_finds_tables_through_rows(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(), [20, 4], [35, 4], generator, with_rows=True))


def test_prefill_of_a_stopped_request_gives_zeros(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(), [50, 3], [0, 3], generator))


def test_max_prefill_tiles_is_enough_for_any_split() -> None:
    for num_tokens in range(40):
        for num_reqs in range(1, 8):
            # As many requests of two tokens as there can be, the rest in one.
            small = min(num_reqs - 1, max(0, (num_tokens - 2) // 2))
            rest = num_tokens - 2 * small
            needed = small + (-(-rest // 4) if rest > 1 else 0)
            assert max_prefill_tiles(num_tokens, num_reqs, 4) >= needed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 80), (10, 2, 96), (8, 1, 256), (3, 3, 64)],
)
def test_prefill_on_the_gpu(
    heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    shape = Shape(heads=heads, kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    for query_lens, history in (
        ([2], [0]),
        ([127, 128, 129], [0, 0, 0]),
        ([300], [777]),
        ([5, 1, 200, 0, 130, 17], [0, 3, 70, 5, 0, 1000]),
    ):
        seq_lens = [a + b for a, b in zip(query_lens, history, strict=True)]
        case = PagedCase(shape, query_lens, seq_lens, generator, num_padding=2, with_rows=True)
        _check(case, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(100, None), (129, 5.0), (0, 20.0)])
def test_prefill_with_window_and_cap_on_the_gpu(
    window: int, soft_cap: float | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    shape = Shape(heads=8, kv_heads=2, head_size=128, dtype=dtype, window=window, soft_cap=soft_cap)
    _check(PagedCase(shape, [300, 20, 3], [300, 520, 90], generator), None)


@pytest.mark.gpu
def test_prefill_reaches_blocks_past_2_to_the_31_elements(
    device: torch.device, generator: torch.Generator
) -> None:
    shape = Shape(heads=8, kv_heads=8, head_size=128, dtype=torch.bfloat16)
    case = PagedCase(shape, [20], [40], generator)
    num_blocks = 2**31 // (16 * 8 * 128) + 4
    cache = torch.zeros(2, num_blocks, 16, 8, 128, dtype=torch.bfloat16, device=device)
    high = torch.tensor([num_blocks - 2, num_blocks - 1, num_blocks - 3], device=device)
    used = case.block_table[0, :3].long()
    cache[0, high], cache[1, high] = case.key_cache[used], case.value_cache[used]
    case.key_cache, case.value_cache = cache[0], cache[1]
    case.block_table[0, :3] = high.int()
    _check(case, None)
