"""What every attention backend must do, on every device and dtype it can be used with here.

The expected result is a loop over tokens in fp64 that shares no code with any backend.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from paged import attention_inputs, null_padded, scattered_tables

from data_plane.attention import base
from data_plane.attention.base import AttentionSpec, backend_infos, select_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_BLOCKS = 96
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
# Where no GPU is, Triton's interpreter runs the kernels on the CPU, slowly.
INTERPRETED = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else None
CASES = [
    pytest.param(
        info.name,
        device,
        dtype,
        id=f"{info.name}-{device}-{str(dtype)[6:]}",
        marks=[pytest.mark.gpu] if device == "cuda" else [],
    )
    for info in backend_infos()
    for device in DEVICES
    if device in info.device_types
    for dtype in info.dtypes
] + [
    pytest.param(name, "cpu", torch.float32, id=f"{name}-interpreted-float32")
    for name in (INTERPRETED,)
    if name
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

pytestmark = pytest.mark.parametrize(("name", "device", "dtype"), CASES)


@pytest.fixture(autouse=True)
def _interpreted_backends_serve_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [
        replace(info, device_types=("cpu",)) if info.name == INTERPRETED else info
        for info in backend_infos()
    ]
    monkeypatch.setattr(base, "_BACKENDS", tuple(infos))


def make_spec(
    name: str,
    device: str,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (6, 2),
    head_size: int = 64,
    block_size: int = 16,
    sliding_window: int | None = None,
) -> AttentionSpec:
    spec = AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        scale=head_size**-0.5,
        sliding_window=sliding_window,
        dtype=dtype,
        block_size=block_size,
        device=torch.device(device),
    )
    (info,) = (info for info in backend_infos() if info.name == name)
    refusal = info.refusal(spec)
    if refusal is not None:
        pytest.skip(refusal)
    return spec


class Bench:
    """A cache full of NaN, the sequences written into it, and the exact answer."""

    def __init__(self, spec: AttentionSpec, name: str, seq_lens: Sequence[int]) -> None:
        self.spec = spec
        self.backend = select_backend(spec, name)
        shape = self.backend.get_kv_cache_shape(
            NUM_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        self.kv_cache = torch.full(shape, float("nan"), dtype=spec.dtype, device=spec.device)
        blocks = max(1, -(-max(seq_lens) // spec.block_size))
        self.tables = scattered_tables(len(seq_lens), blocks, NUM_BLOCKS)
        self.seq_lens = list(seq_lens)
        generator = torch.Generator().manual_seed(11)

        def random(length: int, heads: int) -> torch.Tensor:
            x = torch.randn(length, heads, spec.head_size, generator=generator)
            return x.to(spec.dtype).to(spec.device)

        self.queries = [random(n, spec.num_heads) for n in seq_lens]
        self.keys = [random(n, spec.num_kv_heads) for n in seq_lens]
        self.values = [random(n, spec.num_kv_heads) for n in seq_lens]

    def step(
        self, num_computed: Sequence[int], num_new: Sequence[int], *, num_padding: int = 0
    ) -> torch.Tensor:
        """Writes and attends the given ranges; [num_tokens, num_heads, head_size]."""
        spec = self.spec
        seq_lens = [a + n for a, n in zip(num_computed, num_new, strict=True)]
        inputs = attention_inputs(
            num_computed=num_computed,
            num_new=num_new,
            block_tables=null_padded(self.tables, seq_lens, spec.block_size),
            block_size=spec.block_size,
            num_padding=num_padding,
            device=spec.device.type,
        )

        def batch(parts: list[torch.Tensor]) -> torch.Tensor:
            used = [
                part[a : a + n] for part, a, n in zip(parts, num_computed, num_new, strict=True)
            ]
            padding = torch.full_like(parts[0][:1], float("nan")).expand(num_padding, -1, -1)
            return torch.cat([*used, padding])

        metadata = self.backend.build_metadata(inputs)
        self.backend.write_kv(
            self.kv_cache, batch(self.keys), batch(self.values), inputs.slot_mapping
        )
        query = batch(self.queries)
        out = torch.full_like(query, float("nan"))
        self.backend.forward(query, self.kv_cache, metadata, out)
        return out

    def expected(self, num_computed: Sequence[int], num_new: Sequence[int]) -> torch.Tensor:
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        rows: list[torch.Tensor] = []
        for req, (start, count) in enumerate(zip(num_computed, num_new, strict=True)):
            for position in range(start, start + count):
                first = 0
                if spec.sliding_window is not None:
                    first = max(0, position + 1 - spec.sliding_window)
                keys = self.keys[req][first : position + 1].double().repeat_interleave(group, 1)
                values = self.values[req][first : position + 1].double().repeat_interleave(group, 1)
                query = self.queries[req][position].double()
                scores = torch.einsum("hd,khd->hk", query, keys) * spec.scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return torch.stack(rows)

    def fill(self, lengths: Sequence[int]) -> None:
        """Writes the first tokens of every sequence."""
        self.step([0] * len(lengths), lengths)

    def check(self, num_computed: Sequence[int], num_new: Sequence[int]) -> None:
        self.fill(num_computed)
        actual = self.step(num_computed, num_new)
        torch.testing.assert_close(
            actual.double(),
            self.expected(num_computed, num_new),
            atol=TOLERANCE[self.spec.dtype],
            rtol=TOLERANCE[self.spec.dtype],
        )


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (9, 3), (8, 1), (14, 2)])
def test_decodes_of_odd_lengths(
    name: str, device: str, dtype: torch.dtype, heads: tuple[int, int], block_size: int
) -> None:
    computed = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size - 1]
    spec = make_spec(name, device, dtype, heads=heads, block_size=block_size)
    Bench(spec, name, [n + 1 for n in computed]).check(computed, [1] * len(computed))


@pytest.mark.parametrize("head_size", [20, 64, 80, 96, 128, 256])
def test_head_sizes(name: str, device: str, dtype: torch.dtype, head_size: int) -> None:
    spec = make_spec(name, device, dtype, head_size=head_size)
    Bench(spec, name, [20, 40]).check([19, 5], [1, 35])


@pytest.mark.parametrize("block_size", [16, 32])
def test_prefill_chunks_over_history_and_decodes_in_one_batch(
    name: str, device: str, dtype: torch.dtype, block_size: int
) -> None:
    computed, new = [0, 33, 16, 50, 0, 7], [40, 1, 17, 1, 1, 2]
    spec = make_spec(name, device, dtype, heads=(9, 3), block_size=block_size)
    Bench(spec, name, [a + n for a, n in zip(computed, new, strict=True)]).check(computed, new)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 64])
def test_sliding_window(name: str, device: str, dtype: torch.dtype, window: int) -> None:
    spec = make_spec(name, device, dtype, sliding_window=window)
    computed, new = [0, 33, 16, 50, 3, 40], [40, 1, 17, 1, 1, 9]
    Bench(spec, name, [a + n for a, n in zip(computed, new, strict=True)]).check(computed, new)


def test_many_decodes_of_very_different_lengths(name: str, device: str, dtype: torch.dtype) -> None:
    computed = [1, 300, 2, 5, 290, 17, 18, 1, 33, 100]
    bench = Bench(make_spec(name, device, dtype, block_size=128), name, [n + 1 for n in computed])
    bench.check(computed, [1] * len(computed))


def test_empty_request_and_padding_give_zeros_and_write_nothing(
    name: str, device: str, dtype: torch.dtype
) -> None:
    bench = Bench(make_spec(name, device, dtype), name, [30, 1, 20])
    bench.fill([29, 0, 0])
    before = bench.kv_cache.clone()
    # The middle request has no tokens; two padding tokens follow the last one.
    actual = bench.step([29, 0, 0], [1, 0, 20], num_padding=2)
    assert actual.isfinite().all()
    assert not actual[21:].any()
    torch.testing.assert_close(
        actual[:21].double(),
        bench.expected([29, 0, 0], [1, 0, 20]),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )
    changed = ~((bench.kv_cache == before) | (bench.kv_cache.isnan() & before.isnan()))
    assert int(changed.sum()) == 21 * 2 * bench.keys[0][0].numel()


def test_row_of_length_zero_with_a_token_gives_zeros(
    name: str, device: str, dtype: torch.dtype
) -> None:
    # A padded row of a captured decode batch: one token, slot -1, length 0.
    bench = Bench(make_spec(name, device, dtype), name, [1, 1])
    inputs = attention_inputs(
        num_computed=[0, 0], num_new=[1, 1], block_tables=bench.tables, block_size=16, device=device
    )
    inputs.seq_lens[1] = 0
    inputs.seq_lens_host[1] = 0
    inputs.slot_mapping[1] = -1
    key, value = torch.cat(bench.keys), torch.cat(bench.values)
    bench.backend.write_kv(bench.kv_cache, key, value, inputs.slot_mapping)
    query = torch.cat(bench.queries)
    out = torch.full_like(query, float("nan"))
    metadata = bench.backend.build_metadata(inputs)
    bench.backend.forward(query, bench.kv_cache, metadata, out)
    assert not out[1].any()
    expected = value[0].repeat_interleave(3, 0)
    torch.testing.assert_close(out[0], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_batch_of_padding_only(name: str, device: str, dtype: torch.dtype) -> None:
    bench = Bench(make_spec(name, device, dtype), name, [1])
    actual = bench.step([0], [0], num_padding=4)
    assert actual.shape[0] == 4
    assert not actual.any()
    assert bench.kv_cache.isnan().all()


def test_copied_blocks_hold_the_same_bytes_and_nothing_else_changes(
    name: str, device: str, dtype: torch.dtype
) -> None:
    spec = make_spec(name, device, dtype)
    bench = Bench(spec, name, [40])
    bench.fill([39])
    first, second, third = (int(block) for block in bench.tables[0])
    free = [block for block in range(1, NUM_BLOCKS) if block not in bench.tables][:2]
    other = bench.kv_cache.clone()
    before = other.clone()
    src = torch.tensor([first, third], device=spec.device)
    dst = torch.tensor(free, device=spec.device)
    bench.backend.copy_blocks([bench.kv_cache, other], src, dst)
    bench.tables = np.array([[free[0], second, free[1]]], np.int32)
    torch.testing.assert_close(
        bench.step([39], [1]).double(),
        bench.expected([39], [1]),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )
    # Bytes of the copy in the untouched twin: what was NaN outside the copies still is.
    num_written = int((~other.isnan()).sum()) - int((~before.isnan()).sum())
    assert num_written == (16 + 7) * 2 * spec.num_kv_heads * spec.head_size


def test_result_does_not_depend_on_which_blocks_are_used(
    name: str, device: str, dtype: torch.dtype
) -> None:
    outputs: list[torch.Tensor] = []
    for seed in (1, 2):
        bench = Bench(make_spec(name, device, dtype), name, [50, 20])
        bench.tables = scattered_tables(2, 4, NUM_BLOCKS, seed=seed)
        bench.fill([49, 19])
        outputs.append(bench.step([49, 19], [1, 1]))
    assert torch.equal(outputs[0], outputs[1])
