"""A paged cache full of NaN with sequences scattered in it, and checks of attention over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.reference import paged_attention_ref

POISON = float("nan")
GUARD = 3  # rows of poison before and behind an output


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    window: int = 0

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


class PagedCase:
    """Requests with `query_lens` queries and `seq_lens` keys each; padding tokens behind them.

    Slots that no query sees hold NaN, and so does everything around the output.
    """

    def __init__(
        self,
        shape: Shape,
        query_lens: list[int],
        seq_lens: list[int],
        generator: torch.Generator,
        *,
        num_padding: int = 0,
        with_rows: bool = False,
    ) -> None:
        device = generator.device
        self.shape = shape

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(shape.dtype)

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        num_reqs = len(seq_lens)
        counts = [-(-n // shape.block_size) for n in seq_lens]
        num_blocks = sum(counts) + 5
        cache_shape = (2, num_blocks, shape.block_size, shape.kv_heads, shape.head_size)
        cache = torch.full(cache_shape, POISON, dtype=shape.dtype, device=device)
        num_rows = num_reqs + 3 if with_rows else num_reqs
        # Entries past a sequence name a block of NaN.
        self.block_table = torch.full(
            (num_rows, max([1, *counts]) + 1), num_blocks - 1, dtype=torch.int32, device=device
        )
        order = torch.randperm(num_blocks - 2, generator=generator, device=device).int() + 1
        self.rows = None
        row_of_req = list(range(num_reqs))
        if with_rows:
            self.rows = torch.randperm(num_rows, generator=generator, device=device)[
                :num_reqs
            ].int()
            row_of_req = self.rows.tolist()
        first = 0
        for req, (count, query_len, seq_len) in enumerate(
            zip(counts, query_lens, seq_lens, strict=True)
        ):
            blocks = order[first : first + count]
            first += count
            self.block_table[row_of_req[req], :count] = blocks
            oldest = 0
            if shape.window:
                oldest = max(0, seq_len - max(query_len, 1) + 1 - shape.window)
            index = torch.arange(oldest, seq_len, device=device)
            block, slot = blocks[index // shape.block_size].long(), index % shape.block_size
            cache[:, block, slot] = random(2, index.numel(), shape.kv_heads, shape.head_size)
        self.key_cache, self.value_cache = cache[0], cache[1]
        self.query_start_loc = column([0, *torch.tensor(query_lens).cumsum(0).tolist()])
        self.seq_lens = column(seq_lens)
        num_tokens = sum(query_lens) + num_padding
        # As the model has it: a slice of a wider product.
        self.query = random(num_tokens, shape.heads + 2, shape.head_size)[:, : shape.heads]
        self.query_lens = query_lens
        self.memory = torch.full(
            (num_tokens + 2 * GUARD, shape.heads, shape.head_size),
            POISON,
            dtype=shape.dtype,
            device=device,
        )
        self.out = self.memory[GUARD : GUARD + num_tokens]

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.out.shape, dtype=dtype, device=self.out.device)
        return paged_attention_ref(
            self.query,
            self.query_start_loc,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            scale=self.shape.scale,
            rows=self.rows,
            soft_cap=self.shape.soft_cap,
            window=self.shape.window,
            out=out,
            dtype=dtype,
        )

    def tokens(self, *, single: bool) -> torch.Tensor:
        """[num_tokens] bool: tokens of requests with one query, or of those with several."""
        lens = torch.tensor(self.query_lens)
        chosen = (lens == 1) if single else (lens > 1)
        mask = chosen.repeat_interleave(lens)
        padding = torch.full((self.out.shape[0] - mask.numel(),), single)
        return torch.cat([mask, padding]).to(self.out.device)

    def check(self, written: torch.Tensor) -> None:
        """`written` tokens are right, everything else is still poison."""
        exact = self.reference(torch.float64)[written]
        plain = self.reference(self.shape.dtype)[written]
        actual = self.out[written]
        assert actual.isfinite().all()
        assert_no_worse_than_torch(actual, plain, exact)
        assert self.out[~written].isnan().all()
        assert self.memory[:GUARD].isnan().all()
        assert self.memory[-GUARD:].isnan().all()


def assert_no_worse_than_torch(
    actual: torch.Tensor,
    same_dtype: torch.Tensor,
    exact: torch.Tensor,
    *,
    factor: float = 2.0,
    atol: float = 2e-5,
) -> None:
    """The kernel may be at most `factor` times as far from the exact result as plain torch is."""
    if not exact.numel():
        return
    allowed = factor * float((same_dtype.double() - exact).abs().max()) + atol
    error = float((actual.double() - exact).abs().max())
    assert error <= allowed, f"max error {error:.3e} > allowed {allowed:.3e}"
