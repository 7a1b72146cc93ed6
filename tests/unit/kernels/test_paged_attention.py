from __future__ import annotations

import pytest
import torch
from paged_case import PagedCase, Shape

from kernels.attention_plan import DecodePlan, new_decode_plan, plan_decode
from kernels.paged_attention import paged_attention

HALF = [torch.float16, torch.bfloat16]


def _plan(case: PagedCase, *, num_programs: int | None = None, tile: int | None = None):
    shape = case.shape
    plan = new_decode_plan(
        max_num_reqs=case.seq_lens.numel(),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        device=case.seq_lens.device,
        window=shape.window,
        num_programs=num_programs,
        tile=tile,
    )
    # A kernel that reads what this step's plan did not write finds nonsense there.
    plan.partial.fill_(float("nan"))
    plan.partial_stat.fill_(float("nan"))
    plan.first_tile.fill_(-(10**6))
    return plan_decode(plan, case.query_start_loc, case.seq_lens)


def _run(case: PagedCase, plan: DecodePlan, *, settled: bool = False) -> None:
    paged_attention(
        case.query,
        case.query_start_loc,
        case.key_cache,
        case.value_cache,
        case.block_table,
        case.seq_lens,
        plan,
        scale=case.shape.scale,
        rows=case.rows,
        soft_cap=case.shape.soft_cap,
        settled=settled,
        out=case.out,
    )


def _check(case: PagedCase, **plan_options: int) -> None:
    _run(case, _plan(case, **plan_options))
    case.check(case.tokens(single=True))


@pytest.mark.parametrize("num_programs", [2, 3, 8])
@pytest.mark.parametrize(
    "seq_lens", [[1], [15, 16, 17], [200], [1, 64, 65, 200], [0, 130, 0, 0, 17, 300, 0]]
)
def test_decode_equals_its_reference_however_the_work_is_cut(
    seq_lens: list[int], num_programs: int, generator: torch.Generator
) -> None:
    case = PagedCase(Shape(), [1] * len(seq_lens), seq_lens, generator)
    _check(case, num_programs=num_programs, tile=32)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_decode_serves_any_group_size(group: int, generator: torch.Generator) -> None:
    shape = Shape(heads=2 * group, kv_heads=2)
    _check(PagedCase(shape, [1, 1], [70, 33], generator), num_programs=3, tile=32)


@pytest.mark.parametrize("head_size", [16, 20, 64, 80, 96, 128, 256])
def test_decode_serves_any_head_size(head_size: int, generator: torch.Generator) -> None:
    _check(PagedCase(Shape(head_size=head_size), [1, 1], [70, 33], generator), num_programs=3)


def test_decode_in_fp16(generator: torch.Generator) -> None:
    shape = Shape(dtype=torch.float16)
    _check(PagedCase(shape, [1, 1, 1], [70, 33, 1], generator), num_programs=3, tile=32)


@pytest.mark.parametrize("window", [1, 5, 16, 33, 64])
def test_decode_reads_no_key_outside_the_window(window: int, generator: torch.Generator) -> None:
    shape = Shape(window=window)
    _check(PagedCase(shape, [1, 1, 1], [3, 70, 200], generator), num_programs=3, tile=16)


def test_decode_caps_scores(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(soft_cap=0.7), [1, 1], [70, 33], generator), num_programs=3, tile=32)


def test_decode_finds_tables_through_rows(generator: torch.Generator) -> None:
    case = PagedCase(Shape(), [1, 1, 1], [70, 0, 33], generator, with_rows=True)
    _check(case, num_programs=3, tile=32)


def test_decode_leaves_requests_with_several_queries_and_clears_padding(
    generator: torch.Generator,
) -> None:
    case = PagedCase(
        Shape(), [1, 5, 0, 1, 200, 1], [40, 5, 0, 0, 220, 17], generator, num_padding=7
    )
    _check(case, num_programs=3, tile=32)


def test_decode_of_nothing_gives_zeros(generator: torch.Generator) -> None:
    _check(PagedCase(Shape(), [1, 1, 0], [0, 0, 0], generator, num_padding=2), num_programs=4)


def test_decode_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    case = PagedCase(Shape(), [1, 1], [4, 4], generator)
    plan = _plan(case, num_programs=2)
    with pytest.raises(ValueError, match="2 requests, but the plan is for 1 to 1"):
        plan_decode(
            new_decode_plan(
                max_num_reqs=1,
                num_heads=4,
                num_kv_heads=2,
                head_size=64,
                dtype=torch.float32,
                device=case.query.device,
            ),
            case.query_start_loc,
            case.seq_lens,
        )
    case.block_table = case.block_table[:1]
    with pytest.raises(ValueError, match="2 lengths, 1 tables"):
        _run(case, plan)
    case.query = case.query[..., :32]
    with pytest.raises(ValueError, match="does not match key_cache"):
        _run(case, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 80), (10, 2, 96), (8, 1, 256), (3, 3, 64)],
)
def test_decode_on_the_gpu(
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    shape = Shape(
        heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=dtype
    )
    for seq_lens in ([1], [4097], [1, 15, 16, 17, 0, 127, 128, 129, 1000, 2047], [33] * 70):
        case = PagedCase(
            shape, [1] * len(seq_lens), seq_lens, generator, num_padding=2, with_rows=True
        )
        _check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("window", "soft_cap"), [(100, None), (129, 5.0), (0, 20.0)])
def test_decode_with_window_and_cap_on_the_gpu(
    window: int, soft_cap: float | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    shape = Shape(heads=8, kv_heads=2, head_size=128, dtype=dtype, window=window, soft_cap=soft_cap)
    _check(PagedCase(shape, [1] * 5, [1, 99, 128, 300, 3000], generator))


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 128])
def test_decode_reaches_blocks_past_2_to_the_31_elements(
    head_size: int, device: torch.device, generator: torch.Generator
) -> None:
    shape = Shape(heads=8, kv_heads=8, head_size=head_size, dtype=torch.bfloat16)
    case = PagedCase(shape, [1], [40], generator)
    num_blocks = 2**31 // (16 * 8 * head_size) + 4
    cache = torch.zeros(2, num_blocks, 16, 8, head_size, dtype=torch.bfloat16, device=device)
    high = torch.tensor([num_blocks - 2, num_blocks - 1, num_blocks - 3], device=device)
    used = case.block_table[0, :3].long()
    cache[0, high], cache[1, high] = case.key_cache[used], case.value_cache[used]
    case.key_cache, case.value_cache = cache[0], cache[1]
    case.block_table[0, :3] = high.int()
    _check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
def test_decode_is_bit_equal_every_time(settled: bool, generator: torch.Generator) -> None:
    shape = Shape(heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16)
    cases = [
        PagedCase(shape, [1] * 40, seq_lens, generator)
        for seq_lens in (list(range(10, 4010, 100)), list(range(4000, 0, -100)))
    ]
    plan = _plan(cases[0])
    first: list[torch.Tensor] = []
    for case in cases:
        plan_decode(plan, case.query_start_loc, case.seq_lens)
        _run(case, plan)
        case.check(case.tokens(single=True))
        first.append(case.out.clone())
    for step in range(200):
        # Another step's plan lay there before.
        case = cases[step % 2]
        plan_decode(plan, case.query_start_loc, case.seq_lens)
        case.out.fill_(float("nan"))
        _run(case, plan, settled=settled)
        assert torch.equal(case.out, first[step % 2])


def test_a_head_of_nans_spoils_its_own_request_only(generator: torch.Generator) -> None:
    case = PagedCase(Shape(), [1, 1, 1], [70, 33, 50], generator)
    block = int(case.block_table[1, 0])
    case.value_cache[block, 0, 0] = float("nan")
    _run(case, _plan(case, num_programs=2, tile=32))
    spoiled = case.out.isnan().flatten(1).any(1)
    assert spoiled.tolist() == [False, True, False]
