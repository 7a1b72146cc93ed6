from __future__ import annotations

import pytest
import torch
from paged_case import assert_no_worse_than_torch

from kernels.linear import (
    MAX_GEMV_ROWS,
    MAX_SKINNY_ROWS,
    LinearCut,
    gated_linear,
    gemv,
    linear,
    linear_cut,
    skinny,
)

POISON = -7.0


def _case(
    num_rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    bias: bool,
):
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device).to(dtype)

    x = random(num_rows, in_features + 8)[:, :in_features]
    weight = random(out_features, in_features) / in_features**0.5
    b = random(out_features) if bias else None
    memory = torch.full((num_rows + 2, out_features + 16), POISON, dtype=dtype, device=x.device)
    if x.is_cuda:
        # Weights may be read ahead of the kernels before: they have to be there.
        torch.cuda.synchronize()
    return x, weight, b, memory


def _check(x, weight, bias, memory) -> None:
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    plain = torch.nn.functional.linear(x, weight, bias)
    assert_no_worse_than_torch(memory[1:-1, 8:-8], plain, exact)
    guards = torch.cat([memory[0], memory[-1], memory[:, :8].flatten(), memory[:, -8:].flatten()])
    assert (guards == POISON).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, MAX_GEMV_ROWS])
def test_gemv_equals_the_plain_product(
    num_rows: int, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight, b, memory = _case(num_rows, 21, 100, dtype, generator, bias=bias)
    gemv(x, weight, b, memory[1:-1, 8:-8], LinearCut(4, 32, 4))
    _check(x, weight, b, memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [5, 17, 64, 128])
def test_skinny_product_equals_the_plain_one(
    num_rows: int, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight, b, memory = _case(num_rows, 21, 100, dtype, generator, bias=bias)
    skinny(x, weight, b, memory[1:-1, 8:-8], LinearCut(16, 32, 4, 2))
    _check(x, weight, b, memory)


def _check_gated(x, weight, bias, memory) -> None:
    def gated(y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    plain = gated(torch.nn.functional.linear(x, weight, bias))
    assert_no_worse_than_torch(memory[1:-1, 8:-8], plain, gated(exact))
    guards = torch.cat([memory[0], memory[-1], memory[:, :8].flatten(), memory[:, -8:].flatten()])
    assert (guards == POISON).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_gated_product_equals_the_plain_one(
    num_rows: int, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight, b, memory = _case(num_rows, 42, 100, dtype, generator, bias=bias)
    memory = memory[:, :37].clone()
    if num_rows <= MAX_GEMV_ROWS:
        gemv(x, weight, b, memory[1:-1, 8:-8], LinearCut(4, 32, 4), gated=True)
    else:
        skinny(x, weight, b, memory[1:-1, 8:-8], LinearCut(16, 32, 4, 2), gated=True)
    _check_gated(x, weight, b, memory)


@pytest.mark.parametrize("num_rows", [0, 1, 5, MAX_SKINNY_ROWS + 1])
def test_gated_linear_serves_any_number_of_rows(num_rows: int, generator: torch.Generator) -> None:
    x, weight, b, memory = _case(num_rows, 66, 64, torch.float16, generator, bias=True)
    memory = memory[:, :49].clone()
    gated_linear(x, weight, b, out=memory[1:-1, 8:-8])
    if num_rows:
        _check_gated(x, weight, b, memory)


def test_gated_linear_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    x, weight, _, memory = _case(2, 8, 16, torch.float16, generator, bias=False)
    with pytest.raises(ValueError, match="do not fit each other"):
        gated_linear(x, weight, out=memory[1:-1, 8:-8])
    with pytest.raises(ValueError, match="do not fit each other"):
        gated_linear(x, weight, out=memory[:1, :4])


@pytest.mark.parametrize("num_rows", [0, 1, 5, MAX_SKINNY_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_serves_any_number_of_rows(
    num_rows: int, bias: bool, generator: torch.Generator
) -> None:
    x, weight, b, memory = _case(num_rows, 33, 64, torch.float16, generator, bias=bias)
    linear(x, weight, b, out=memory[1:-1, 8:-8])
    if num_rows:
        _check(x, weight, b, memory)


def test_linear_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    x, weight, _, memory = _case(2, 8, 16, torch.float32, generator, bias=False)
    with pytest.raises(ValueError, match="do not fit each other"):
        linear(x, weight[:, :8], out=memory[1:-1, 8:-8])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 33, 64, 65])
@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(4096, 1024), (1024, 2048), (1024, 3072), (576, 1536), (960, 576), (4096, 14336)],
)
def test_linear_on_the_gpu(
    out_features: int,
    in_features: int,
    num_rows: int,
    bias: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    x, weight, b, memory = _case(num_rows, out_features, in_features, dtype, generator, bias=bias)
    linear(x, weight, b, out=memory[1:-1, 8:-8])
    _check(x, weight, b, memory)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 32, 33, 65, 129])
@pytest.mark.parametrize(("size", "in_features"), [(3072, 1024), (1536, 576), (14336, 4096)])
def test_gated_linear_on_the_gpu(
    size: int,
    in_features: int,
    num_rows: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    x, weight, b, _ = _case(num_rows, 2 * size, in_features, dtype, generator, bias=True)
    memory = torch.full((num_rows + 2, size + 16), POISON, dtype=dtype, device=x.device)
    gated_linear(x, weight, b, out=memory[1:-1, 8:-8])
    _check_gated(x, weight, b, memory)


@pytest.mark.gpu
def test_a_chain_of_dependent_launches_is_bit_equal_every_time(
    generator: torch.Generator,
) -> None:
    x, weight, _, _ = _case(1, 2048, 2048, torch.bfloat16, generator, bias=False)
    first, second = torch.empty(2, 1, 2048, dtype=x.dtype, device=x.device)

    def chain() -> torch.Tensor:
        # Each product reads what the one before has just written.
        linear(x, weight, out=first)
        for _ in range(10):
            linear(first, weight, out=second)
            linear(second, weight, out=first)
        return first.clone()

    expected = chain()
    for _ in range(300):
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        assert torch.equal(chain(), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("in_features", [576, 1024, 2048, 3072, 4096, 14336])
@pytest.mark.parametrize("out_features", [576, 1024, 2048, 4096, 6144, 9216, 28672, 151936])
def test_every_cut_fits_the_shared_memory(out_features: int, in_features: int, gated: bool) -> None:
    for num_rows in range(1, MAX_SKINNY_ROWS + 2):
        cut = linear_cut(num_rows, out_features, in_features, gated=gated)
        if cut is not None and cut.num_stages:
            assert num_rows <= MAX_SKINNY_ROWS
            rows = max(16, 1 << (num_rows - 1).bit_length())
            assert cut.stage_bytes(num_rows) <= 227 * 1024
            # Registers: fp32 sums of a tile, by thread.
            assert cut.out_tile * rows // (32 * cut.num_warps) <= 64
        elif cut is not None:
            assert num_rows <= MAX_GEMV_ROWS
