from __future__ import annotations

import pytest
import torch

from kernels.reference import reshape_and_cache_ref
from kernels.reshape_and_cache import reshape_and_cache

POISON = -7.0
LAYOUTS = ("kv_first", "blocks_first", "heads_before_slots")


def _caches(
    layout: str, num_blocks: int, block_size: int, heads: int, size: int, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The poisoned memory, and the key and value caches as views of it."""
    if layout == "kv_first":
        memory = torch.full((2, num_blocks, block_size, heads, size), POISON, **kwargs)
        return memory, memory[0], memory[1]
    if layout == "blocks_first":
        memory = torch.full((num_blocks, 2, block_size, heads, size), POISON, **kwargs)
        return memory, memory[:, 0], memory[:, 1]
    memory = torch.full((2, num_blocks, heads, block_size, size + 8), POISON, **kwargs)
    views = memory[..., :size].transpose(2, 3)
    return memory, views[0], views[1]


def _check(
    *,
    layout: str,
    num_tokens: int,
    block_size: int,
    heads: int,
    size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    device = generator.device
    num_blocks = 12
    # Keys and values as the model has them: slices of one QKV product.
    qkv = torch.randn(num_tokens, 4 * heads, size, dtype=dtype, device=device, generator=generator)
    key, value = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    slots = torch.randperm(num_blocks * block_size, device=device, generator=generator)
    slots = slots[:num_tokens].clone()
    slots[::3] = -1
    memory, *caches = _caches(
        layout, num_blocks, block_size, heads, size, dtype=dtype, device=device
    )
    expected, *expected_caches = _caches(
        layout, num_blocks, block_size, heads, size, dtype=dtype, device=device
    )
    reshape_and_cache(key, value, *caches, slots)
    reshape_and_cache_ref(key, value, *expected_caches, slots)
    # The whole memory is compared: what no slot names still holds the poison.
    assert torch.equal(memory, expected)
    assert (memory != POISON).sum() == 2 * (slots >= 0).sum() * heads * size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (3, 80)])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 17])
def test_reshape_and_cache_equals_its_reference(
    layout: str,
    block_size: int,
    heads: int,
    size: int,
    num_tokens: int,
    generator: torch.Generator,
) -> None:
    _check(
        layout=layout,
        num_tokens=num_tokens,
        block_size=block_size,
        heads=heads,
        size=size,
        dtype=torch.float32,
        generator=generator,
    )


def test_reshape_and_cache_copies_fp16_bit_for_bit_in_several_tiles(
    generator: torch.Generator,
) -> None:
    _check(
        layout="kv_first",
        num_tokens=7,
        block_size=16,
        heads=9,
        size=128,  # 1152 elements: more than a tile
        dtype=torch.float16,
        generator=generator,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 127])
def test_reshape_and_cache_equals_its_reference_in_half_precision(
    layout: str, dtype: torch.dtype, num_tokens: int, generator: torch.Generator
) -> None:
    _check(
        layout=layout,
        num_tokens=num_tokens,
        block_size=16,
        heads=8,
        size=128,
        dtype=dtype,
        generator=generator,
    )


@pytest.mark.gpu
def test_reshape_and_cache_reaches_blocks_past_2_to_the_31_elements(
    device: torch.device, generator: torch.Generator
) -> None:
    block_size, heads, size = 16, 8, 128
    num_blocks = 2**31 // (block_size * heads * size) + 3
    memory = torch.zeros(
        2, num_blocks, block_size, heads, size, dtype=torch.bfloat16, device=device
    )
    key, value = torch.randn(
        2, 2, heads, size, dtype=torch.bfloat16, device=device, generator=generator
    )
    last = num_blocks * block_size - 1
    slots = torch.tensor([last, 5], device=device)
    reshape_and_cache(key, value, memory[0], memory[1], slots)
    assert torch.equal(memory[0, -1, -1], key[0])
    assert torch.equal(memory[1, -1, -1], value[0])
    assert torch.equal(memory[0, 0, 5], key[1])
    assert memory.count_nonzero() == key.count_nonzero() + value.count_nonzero()


def test_reshape_and_cache_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    device = generator.device
    key = torch.zeros(3, 2, 8, device=device)
    _, key_cache, value_cache = _caches("kv_first", 4, 16, 2, 8, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="same tokens"):
        reshape_and_cache(key, key, key_cache, value_cache, slots[:2])
    with pytest.raises(ValueError, match="do not hold tokens"):
        reshape_and_cache(key[:, :1], key[:, :1], key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="cannot write"):
        reshape_and_cache(key.half(), key.half(), key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="contiguous"):
        reshape_and_cache(
            torch.zeros(3, 8, 2, device=device).transpose(1, 2), key, key_cache, value_cache, slots
        )
