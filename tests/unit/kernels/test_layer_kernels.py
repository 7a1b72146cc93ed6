"""The small kernels of a layer against their references; outputs lie between poisoned guards."""

from __future__ import annotations

import pytest
import torch
from paged_case import assert_no_worse_than_torch

from kernels.copy_blocks import cache_addresses, copy_blocks
from kernels.merge_attention_states import merge_attention_states
from kernels.reference import (
    copy_blocks_ref,
    merge_attention_states_ref,
    rms_norm_ref,
    rotary_and_cache_ref,
    silu_mul_ref,
)
from kernels.rms_norm import rms_norm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.silu_mul import silu_mul

FP32_FP16 = [torch.float32, torch.float16]
HALF = [torch.float16, torch.bfloat16]
POISON = -7.0
# Distance of one rounding, relative.
EPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=generator, device=generator.device).to(dtype)
    if generator.device.type == "cuda":
        # Weights may be read ahead of the kernels before: they have to be there.
        torch.cuda.synchronize()
    return x


def _guarded(dtype: torch.dtype, device: torch.device, rows: int, columns: int):
    memory = torch.full((rows + 2, columns + 16), POISON, dtype=dtype, device=device)
    return memory, memory[1:-1, 8:-8]


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    eps = EPS[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=eps, atol=eps)


def _check_guards(memory: torch.Tensor) -> None:
    assert (memory[0] == POISON).all()
    assert (memory[-1] == POISON).all()
    assert (memory[:, :8] == POISON).all()
    assert (memory[:, -8:] == POISON).all()


def _check_rms_norm(
    dtype: torch.dtype, tokens: int, hidden: int, generator: torch.Generator, *, residual: bool
) -> None:
    device = generator.device
    x = _random(generator, dtype, tokens, hidden + 4)[:, :hidden]
    weight = _random(generator, dtype, hidden)
    total = _random(generator, dtype, tokens, hidden) if residual else None
    expected_total = None if total is None else total.clone()
    memory, out = _guarded(dtype, device, tokens, hidden)
    rms_norm(x, weight, eps=1e-5, residual=total, out=out)
    expected = torch.empty_like(x)
    rms_norm_ref(x, weight, eps=1e-5, residual=expected_total, out=expected)
    _assert_close(out, expected)
    _check_guards(memory)
    if total is not None and expected_total is not None:
        assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", FP32_FP16)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 64), (1, 64), (3, 576), (2, 1000)])
def test_rms_norm_equals_its_reference(
    dtype: torch.dtype, residual: bool, tokens: int, hidden: int, generator: torch.Generator
) -> None:
    _check_rms_norm(dtype, tokens, hidden, generator, residual=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1024), (257, 4096), (33, 8192), (5, 576)])
def test_rms_norm_on_the_gpu(
    dtype: torch.dtype, residual: bool, tokens: int, hidden: int, generator: torch.Generator
) -> None:
    _check_rms_norm(dtype, tokens, hidden, generator, residual=residual)


def test_a_row_of_nan_stays_alone(generator: torch.Generator) -> None:
    x = _random(generator, torch.float32, 3, 64)
    x[1, 5] = float("nan")
    weight = _random(generator, torch.float32, 64)
    out = rms_norm(x, weight, eps=1e-5, out=torch.empty_like(x))
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]


def _check_silu_mul(dtype: torch.dtype, tokens: int, size: int, generator: torch.Generator) -> None:
    gate_up = _random(generator, dtype, tokens, 2 * size + 8)[:, : 2 * size] * 4
    memory, out = _guarded(dtype, generator.device, tokens, size)
    silu_mul(gate_up, out=out)
    _assert_close(out, silu_mul_ref(gate_up, out=torch.empty_like(out)))
    _check_guards(memory)


@pytest.mark.parametrize("dtype", FP32_FP16)
@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 64), (3, 1536), (2, 1000)])
def test_silu_mul_equals_its_reference(
    dtype: torch.dtype, tokens: int, size: int, generator: torch.Generator
) -> None:
    _check_silu_mul(dtype, tokens, size, generator)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (257, 14336), (33, 1000)])
def test_silu_mul_on_the_gpu(
    dtype: torch.dtype, tokens: int, size: int, generator: torch.Generator
) -> None:
    _check_silu_mul(dtype, tokens, size, generator)


def _check_rotary(
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    head_size: int,
    generator: torch.Generator,
    *,
    norm: bool,
    positions_up_to: int = 5000,
) -> None:
    device = generator.device
    num_heads, num_kv_heads = heads
    block_size, num_blocks = 16, 2 + tokens // 8
    qkv = _random(generator, dtype, tokens, (num_heads + 2 * num_kv_heads) * head_size)
    positions = torch.randint(positions_up_to, (tokens,), generator=generator, device=device)
    exponents = torch.arange(0, head_size, 2, device=device) / head_size
    inv_freq = 1.0 / 10000.0**exponents
    norms = [_random(generator, dtype, head_size) if norm else None for _ in range(2)]
    slots = torch.randperm(num_blocks * block_size, generator=generator, device=device)[:tokens]
    slots[::3] = -1
    shape = (2, num_blocks, block_size, num_kv_heads, head_size)
    cache = torch.full(shape, POISON, dtype=dtype, device=device)
    expected_cache = cache.clone()
    memory, out = _guarded(dtype, device, tokens, num_heads * head_size)
    query = out.unflatten(1, (num_heads, head_size))
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    rotary_and_cache(qkv, positions, inv_freq, slots, cache[0], cache[1], **options, query=query)
    expected = torch.empty_like(query)
    rotary_and_cache_ref(
        qkv, positions, inv_freq, slots, *expected_cache, **options, query=expected
    )
    # Angles of thousands of radians: their fp32 product is rounded alike, sine and cosine are not.
    tolerance = max(EPS[dtype], 1e-5)
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, expected_cache, rtol=tolerance, atol=tolerance)
    assert torch.equal(cache[1], expected_cache[1])
    assert torch.equal(cache == POISON, expected_cache == POISON)
    _check_guards(memory)


@pytest.mark.parametrize("dtype", FP32_FP16)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_size"),
    [(0, (2, 1), 64), (1, (4, 2), 64), (5, (9, 3), 64), (4, (7, 1), 80), (3, (6, 6), 20)],
)
def test_rotary_and_cache_equals_its_reference(
    dtype: torch.dtype,
    norm: bool,
    tokens: int,
    heads: tuple[int, int],
    head_size: int,
    generator: torch.Generator,
) -> None:
    _check_rotary(dtype, tokens, heads, head_size, generator, norm=norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_size"),
    [(1, (16, 8), 128), (257, (32, 8), 128), (33, (9, 3), 64), (40, (14, 2), 80), (7, (8, 1), 256)],
)
def test_rotary_and_cache_on_the_gpu(
    dtype: torch.dtype,
    norm: bool,
    tokens: int,
    heads: tuple[int, int],
    head_size: int,
    generator: torch.Generator,
) -> None:
    _check_rotary(dtype, tokens, heads, head_size, generator, norm=norm, positions_up_to=130_000)


def test_rotary_and_cache_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    qkv = _random(generator, torch.float32, 2, 4 * 64)
    device = qkv.device
    cache = torch.zeros(2, 3, 16, 1, 64, device=device)
    columns = torch.zeros(2, dtype=torch.int64, device=device)
    inv_freq = torch.ones(32, device=device)
    query = torch.empty(2, 2, 64, device=device)
    with pytest.raises(ValueError, match="do not describe the same tokens"):
        rotary_and_cache(qkv, columns[:1], inv_freq, columns, *cache, query=query)
    with pytest.raises(ValueError, match="cannot write"):
        rotary_and_cache(qkv, columns, inv_freq, columns, *cache.half(), query=query)
    with pytest.raises(ValueError, match="together"):
        rotary_and_cache(
            qkv, columns, inv_freq, columns, *cache, q_norm=torch.ones(64), query=query
        )


def _check_merge(
    dtype: torch.dtype, tokens: int, heads: int, size: int, generator: torch.Generator
) -> None:
    out_a = _random(generator, dtype, tokens, heads, size)
    out_b = _random(generator, dtype, tokens, heads, size)
    lse_a, lse_b = _random(generator, torch.float32, 2, tokens, heads) * 30
    lse_a.view(-1)[::3] = -torch.inf
    lse_b.view(-1)[::2] = -torch.inf
    # The output of a side without keys may be anything.
    out_a.view(-1, size)[::3] = float("nan")
    out, lse = torch.full_like(out_a, POISON), torch.full_like(lse_a, POISON)
    merge_attention_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)
    expected, expected_lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    merge_attention_states_ref(out_a, lse_a, out_b, lse_b, out=expected, lse=expected_lse)
    _assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FP32_FP16)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 2, 64), (1, 6, 64), (3, 4, 80)])
def test_merge_attention_states_equals_its_reference(
    dtype: torch.dtype, tokens: int, heads: int, size: int, generator: torch.Generator
) -> None:
    _check_merge(dtype, tokens, heads, size, generator)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_merge_attention_states_on_the_gpu(dtype: torch.dtype, generator: torch.Generator) -> None:
    _check_merge(dtype, 77, 32, 128, generator)


def test_merged_halves_equal_attention_over_all_keys(generator: torch.Generator) -> None:
    query = _random(generator, torch.float32, 3, 2, 16)
    key, value = _random(generator, torch.float32, 2, 20, 2, 16)

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        score = torch.einsum("qhd,khd->qhk", query, key[part])
        out = torch.einsum("qhk,khd->qhd", score.softmax(-1), value[part])
        return out.contiguous(), score.logsumexp(-1)

    halves = (*attend(slice(0, 7)), *attend(slice(7, 20)))
    whole, whole_lse = attend(slice(0, 20))
    out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
    merge_attention_states(*halves, out=out, lse=lse)
    assert_no_worse_than_torch(out, whole, whole.double())
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("dtype", [*FP32_FP16, torch.bfloat16])
@pytest.mark.parametrize("block_shape", [(16, 1, 4), (16, 3, 64), (32, 8, 128)])
def test_copy_blocks_copies_bytes_in_every_layer(
    dtype: torch.dtype, block_shape: tuple[int, ...], generator: torch.Generator
) -> None:
    device = generator.device
    caches = [_random(generator, dtype, 2, 9, *block_shape) for _ in range(3)]
    expected = [cache.clone() for cache in caches]
    src, dst = torch.tensor([1, 8, 1], device=device), torch.tensor([3, 2, 7], device=device)
    copy_blocks(caches, src, dst)
    copy_blocks_ref(expected, src, dst)
    for cache, right in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))
    copy_blocks(caches, src[:0], dst[:0], addresses=cache_addresses(caches))


def test_copy_blocks_refuses_what_it_cannot_copy(generator: torch.Generator) -> None:
    cache = _random(generator, torch.float32, 2, 4, 16, 1, 8)
    ids = torch.tensor([1, 2], device=cache.device)
    with pytest.raises(ValueError, match="2 blocks cannot be copied to 1"):
        copy_blocks([cache], ids, ids[:1])
    with pytest.raises(ValueError, match="one shape and dtype"):
        copy_blocks([cache, cache.half()], ids, ids)
    odd = torch.zeros(2, 4, 1, 1, 3, dtype=torch.uint8, device=cache.device)
    with pytest.raises(ValueError, match="3 bytes"):
        copy_blocks([odd], ids, ids)


@pytest.mark.gpu
def test_copy_blocks_reaches_past_2_to_the_31_elements(device: torch.device) -> None:
    num_blocks = 2**31 // (16 * 8 * 128) + 3
    cache = torch.zeros(2, num_blocks, 16, 8, 128, dtype=torch.bfloat16, device=device)
    cache[:, 1] = 1.0
    copy_blocks(
        [cache], torch.tensor([1], device=device), torch.tensor([num_blocks - 1], device=device)
    )
    assert (cache[:, -1] == 1).all()
    assert cache.count_nonzero() == 4 * cache[0, 0].numel()
