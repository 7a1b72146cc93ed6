from __future__ import annotations

import pytest
import torch

from data_plane.attention.base import AttentionSpec, select_backend
from data_plane.kv_cache import KVCacheError, allocate_kv_caches, bytes_per_token, plan_kv_cache

CPU = torch.device("cpu")
SHAPE = {"num_layers": 3, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
PER_TOKEN = 2 * 3 * 2 * 8 * 4


def _plan(**kwargs: object):
    arguments = {"block_size": 16, "max_model_len": 64, "device": CPU, **SHAPE, **kwargs}
    return plan_kv_cache(**arguments)  # pyright: ignore


def test_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    assert bytes_per_token(**SHAPE) == PER_TOKEN  # pyright: ignore


def test_number_of_blocks_is_taken_as_given() -> None:
    config = _plan(num_blocks=5, kv_cache_memory=1)
    assert config.num_blocks == 5
    assert config.num_tokens == 64


def test_memory_is_filled_with_whole_blocks() -> None:
    assert _plan(kv_cache_memory=7 * 16 * PER_TOKEN + 1).num_blocks == 7


def test_cpu_default_is_bounded() -> None:
    config = _plan()
    assert config.num_blocks >= 5
    assert config.num_blocks * 16 * PER_TOKEN <= 1 << 30


def test_refusal_names_the_longest_sequence_that_fits() -> None:
    with pytest.raises(KVCacheError, match=r"longest sequence that fits has 48 tokens.*to 48"):
        _plan(num_blocks=4)


def test_refusal_names_memory_that_is_enough() -> None:
    with pytest.raises(KVCacheError) as refusal:
        _plan(kv_cache_memory=16 * PER_TOKEN, max_model_len=65)
    needed = int(str(refusal.value).split("--kv-cache-memory ")[1].rstrip(").").strip())
    assert _plan(kv_cache_memory=needed, max_model_len=65).num_tokens >= 65
    with pytest.raises(KVCacheError):
        _plan(kv_cache_memory=needed - 1, max_model_len=65)


def test_description_names_tokens_and_concurrency() -> None:
    described = _plan(num_blocks=13).describe()
    assert "192 tokens in 12 blocks of 16" in described
    assert "3.0 sequences of max_model_len=64" in described


def test_caches_have_the_backends_shape_and_a_zeroed_null_block() -> None:
    config = _plan(num_blocks=5)
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        scale=1.0,
        dtype=torch.float32,
        block_size=16,
        device=CPU,
    )
    backend = select_backend(spec)
    caches = allocate_kv_caches(config, backend, CPU)
    assert len(caches) == 3
    assert {tuple(cache.shape) for cache in caches} == {backend.get_kv_cache_shape(5, 16, 2, 8)}
    assert not any(cache.any() for cache in caches)


@pytest.mark.gpu
@pytest.mark.usefixtures("idle_gpu")
def test_gpu_budget_leaves_what_others_use() -> None:
    cuda = torch.device("cuda")
    total = torch.cuda.get_device_properties(cuda).total_memory
    held = torch.empty(total // 10, dtype=torch.uint8, device=cuda)
    whole = _plan(device=cuda, gpu_memory_utilization=0.5)
    assert whole.num_blocks * 16 * PER_TOKEN <= total * 0.5 - held.nbytes
    less = _plan(device=cuda, gpu_memory_utilization=0.5, activation_bytes=total // 10)
    assert less.num_blocks < whole.num_blocks
    # The allocator would keep it, and count it as used, for the tests that follow.
    del held
    torch.cuda.empty_cache()
