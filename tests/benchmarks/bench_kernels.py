"""The GPU kernels alone, beside SDPA and torch, and beside the figures they have to reach.

    python tests/benchmarks/bench_kernels.py [--json FILE] [--only attention,ragged,delta,sampling,
                                              linear,layer]

Shape of attention: 32 query heads, 8 KV heads of 128, bf16, blocks of 16 in random order. Every
figure is the median over replays of a CUDA graph that holds many launches; attention rotates over
several KV caches so that none finds its keys in L2. Each kernel is checked before it is timed:
attention against fp64, relative error. SDPA reads contiguous keys, without paging: what the
hardware gives. A decode's share is of the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from kernel_timing import DEVICE, copy_bandwidth, goal_of, show, timed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_plane import row_state as rs
from data_plane.sampler import PURPOSE_TOKEN
from kernels.apply_block_table_delta import apply_block_table_delta
from kernels.attention_plan import max_prefill_tiles, new_decode_plan, plan_decode, plan_prefill
from kernels.linear import linear
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill, prefill_tiles
from kernels.reference import paged_attention_ref
from kernels.rms_norm import rms_norm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.sample_rows import new_sample_scratch, sample_rows
from kernels.silu_mul import silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel_timing import Launch

BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_SIZE**-0.5
TOKEN_BYTES = 2 * KV_HEADS * HEAD_SIZE * BF16.itemsize
ROTATE_BYTES = 256 << 20  # several times the L2

# (batch, context): must and aim, in µs or as a share of copy bandwidth.
DECODES: dict[tuple[int, int], tuple[float, float] | None] = {
    (1, 1024): (13, 11),
    (1, 4096): (17, 14),
    (1, 16384): (32, 27),
    (8, 1024): (21, 17),
    (8, 4096): (48, 41),
    (8, 16384): None,
    (64, 1024): None,
    (64, 4096): (0.95, 1.03),
    (256, 1024): None,
    (256, 4096): (0.95, 1.03),
    (256, 16384): (0.95, 1.03),
}
RAGGED = {64: (0.88, 1.0), 256: (0.88, 1.0)}
PREFILLS: dict[tuple[int, int], tuple[float, float] | None] = {
    (1, 4096): None,
    (1, 16384): (300, 400),
    (8, 2048): (250, 320),
}
DELTA_US = (5.0, 3.0)
MAX_SETS = 64


class Paged:
    """Sequences scattered over several KV caches."""

    def __init__(self, query_lens: list[int], seq_lens: list[int]) -> None:
        num_reqs = len(seq_lens)
        counts = [-(-n // BLOCK_SIZE) for n in seq_lens]
        self.num_blocks = sum(counts) + 1
        num_bytes = sum(seq_lens) * TOKEN_BYTES
        self.num_sets = max(1, min(MAX_SETS, math.ceil(ROTATE_BYTES / num_bytes)))
        shape = (2, self.num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        self.caches = [torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(self.num_sets)]
        order = torch.randperm(self.num_blocks - 1, device=DEVICE).int() + 1
        self.table = torch.zeros(num_reqs, max(counts), dtype=torch.int32, device=DEVICE)
        first = 0
        for req, count in enumerate(counts):
            self.table[req, :count] = order[first : first + count]
            first += count
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn(starts[-1], HEADS, HEAD_SIZE, device=DEVICE, dtype=BF16)
        self.out = torch.full_like(self.query, float("nan"))

    def decode(self) -> Launch:
        plan = new_decode_plan(
            max_num_reqs=self.seq_lens.numel(),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=BF16,
            device=DEVICE,
        )
        plan_decode(plan, self.query_start_loc, self.seq_lens)
        torch.cuda.synchronize()  # the plan is settled
        return lambda i: paged_attention(
            self.query,
            self.query_start_loc,
            self.caches[i][0],
            self.caches[i][1],
            self.table,
            self.seq_lens,
            plan,
            scale=SCALE,
            settled=True,
            out=self.out,
        )

    def prefill(self) -> Launch:
        query_tile = prefill_tiles(HEAD_SIZE, BF16).query_tile
        num_tiles = max_prefill_tiles(self.query.shape[0], self.seq_lens.numel(), query_tile)
        tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=DEVICE)
        plan_prefill(self.query_start_loc, query_tile=query_tile, out=tiles)
        return lambda i: paged_prefill(
            self.query,
            self.query_start_loc,
            self.caches[i][0],
            self.caches[i][1],
            self.table,
            self.seq_lens,
            tiles,
            scale=SCALE,
            out=self.out,
        )

    def error(self, launch: Launch) -> float:
        """Relative error of set 0 against fp64."""
        launch(0)
        expected = torch.empty(self.out.shape, dtype=torch.float64, device=DEVICE)
        paged_attention_ref(
            self.query,
            self.query_start_loc,
            *self.caches[0],
            self.table,
            self.seq_lens,
            scale=SCALE,
            out=expected,
        )
        return float((self.out.double() - expected).norm() / expected.norm())

    def sdpa(self, backend: SDPBackend, *, is_causal: bool) -> Launch:
        """The same size with contiguous keys; all sequences of one length."""
        num_reqs, seq_len = self.seq_lens.numel(), int(self.seq_lens[0])
        query = self.query.view(num_reqs, -1, HEADS, HEAD_SIZE).transpose(1, 2)
        kv = [
            cache[:, 1:]
            .reshape(2, -1, KV_HEADS, HEAD_SIZE)[:, : num_reqs * seq_len]
            .reshape(2, num_reqs, seq_len, KV_HEADS, HEAD_SIZE)
            .transpose(2, 3)
            for cache in self.caches
        ]

        def launch(i: int) -> object:
            with sdpa_kernel([backend]):
                return functional.scaled_dot_product_attention(
                    query, kv[i][0], kv[i][1], is_causal=is_causal, enable_gqa=True, scale=SCALE
                )

        return launch


def checks() -> dict[str, float]:
    """Relative errors on odd shapes; far above one rounding of bf16 is a fault."""
    lens = [1, 16, 17, 300, 1000, 1024, 2047, 3333]
    decode = Paged([1] * 8, lens)
    prefill = Paged([77, 300, 512, 64, 200], [77, 300, 512, 1000, 777])
    errors = {"decode": decode.error(decode.decode()), "prefill": prefill.error(prefill.prefill())}
    for name, error in errors.items():
        if not error < 1e-2:
            raise RuntimeError(f"{name} is off by {error:.1e}")
    return errors


def sdpa_times(case: Paged, *, is_causal: bool) -> dict[str, float | None]:
    times: dict[str, float | None] = {}
    for name, backend in (
        ("sdpa_cudnn_us", SDPBackend.CUDNN_ATTENTION),
        ("sdpa_flash_us", SDPBackend.FLASH_ATTENTION),
    ):
        try:
            launch = case.sdpa(backend, is_causal=is_causal)
            times[name] = timed(launch, case.num_sets)
        except RuntimeError as error:
            print(f"{name} does not run: {str(error).splitlines()[0]}", file=sys.stderr)
            times[name] = None
    return times


def attention_rows(bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (batch, context), goal in DECODES.items():
        case = Paged([1] * batch, [context] * batch)
        us = timed(case.decode(), case.num_sets)
        share = batch * context * TOKEN_BYTES / us * 1e6 / bandwidth
        row = {"what": f"decode {batch} x {context}", "us": us, "share": share}
        rows.append(row | sdpa_times(case, is_causal=False) | goal_of(goal, us, share))
        del case
        torch.cuda.empty_cache()
    for (batch, length), goal in PREFILLS.items():
        case = Paged([length] * batch, [length] * batch)
        us = timed(case.prefill(), case.num_sets)
        # Two products over half of the square.
        tflops = 2 * batch * length * length * HEADS * HEAD_SIZE / us / 1e6
        row = {"what": f"prefill {batch} x {length}", "us": us, "tflops": tflops}
        rows.append(row | sdpa_times(case, is_causal=True) | goal_of(goal, us, tflops))
        del case
        torch.cuda.empty_cache()
    return rows


def ragged_rows(bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch, goal in RAGGED.items():
        rng = random.Random(0)
        lens = [rng.randint(16, 8192) for _ in range(batch)]
        case = Paged([1] * batch, lens)
        us = timed(case.decode(), case.num_sets)
        share = sum(lens) * TOKEN_BYTES / us * 1e6 / bandwidth
        row = {"what": f"decode {batch} x 16..8192", "us": us, "share": share}
        rows.append(row | goal_of(goal, us, share))
        plan = new_decode_plan(
            max_num_reqs=batch,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            dtype=BF16,
            device=DEVICE,
        )
        us = timed(lambda _, p=plan, c=case: plan_decode(p, c.query_start_loc, c.seq_lens), 1)
        rows.append({"what": f"decode plan, {batch} rows (once per step)", "us": us})
        del case
        torch.cuda.empty_cache()
    return rows


def delta_rows() -> list[dict[str, Any]]:
    """256 rows get one block each, the commit of a step at a block boundary; the kernel alone."""
    table = torch.zeros(257, 2048, dtype=torch.int32, device=DEVICE)

    def column(values: range) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)

    delta = (column(range(256)), column(range(256)), column(range(257)), column(range(1, 257)))
    us = timed(lambda _: apply_block_table_delta(table, *delta), 1)
    return [{"what": "delta of 256 rows", "us": us} | goal_of(DELTA_US, us, 0.0)]


def sampling_rows(count: int) -> list[dict[str, Any]]:
    """The tails of a step of `count` rows over a vocabulary of Qwen3's size."""
    vocab_size = 151936
    logits = torch.randn(count, vocab_size, device=DEVICE).mul_(3).to(BF16)
    words = torch.zeros(count, rs.NUM_WORDS, dtype=torch.int32, device=DEVICE)
    words[:, rs.ACTIVE], words[:, rs.MAX_TOTAL] = 1, 1 << 30
    stop_ids = torch.full((count, rs.MAX_STOP_IDS), -1, dtype=torch.int32, device=DEVICE)
    results = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    index = torch.arange(count, dtype=torch.int32, device=DEVICE)
    scratch = new_sample_scratch(max_num_samples=count, vocab_size=vocab_size, device=DEVICE)

    def sample(*, is_filtered: bool) -> object:
        return sample_rows(
            logits,
            index,
            words,
            stop_ids,
            layout=rs.LAYOUT,
            purpose=PURPOSE_TOKEN,
            is_filtered=is_filtered,
            scratch=scratch,
            results=results,
        )

    rows: list[dict[str, Any]] = []
    for name, top_k, top_p in (
        ("temperature", 0, 1.0),
        ("top_k 20", 20, 1.0),
        ("top_p 0.95", 0, 0.95),
        ("top_k 20, top_p 0.95", 20, 0.95),
    ):
        words[:, rs.TOP_K] = top_k
        words.view(torch.float32)[:, [rs.TEMPERATURE, rs.TOP_P]] = torch.tensor(
            [0.6, top_p], device=DEVICE
        )
        is_filtered = name != "temperature"
        us = timed(lambda _, f=is_filtered: sample(is_filtered=f), 1)
        rows.append({"what": f"sample {count} x {vocab_size}, {name}", "us": us})
    return [
        *rows,
        {"what": f"torch argmax {count}", "us": timed(lambda _: logits.argmax(-1), 1)},
    ]


def linear_rows() -> list[dict[str, Any]]:
    """Products of Qwen3-0.6B and Llama-3.1-8B at few rows, over rotating weights."""
    rows: list[dict[str, Any]] = []
    shapes = {
        "0.6B qkv": (4096, 1024),
        "0.6B o": (1024, 2048),
        "0.6B gate-up": (6144, 1024),
        "0.6B down": (1024, 3072),
        "8B qkv": (6144, 4096),
        "8B o": (4096, 4096),
        "8B gate-up": (28672, 4096),
        "8B down": (4096, 14336),
    }
    for name, (out_features, in_features) in shapes.items():
        num_bytes = out_features * in_features * 2
        sets = max(1, min(MAX_SETS, ROTATE_BYTES // num_bytes))
        weights = [
            torch.randn(out_features, in_features, device=DEVICE, dtype=BF16) for _ in range(sets)
        ]
        torch.cuda.synchronize()
        for num_rows in (1, 8, 32, 64):
            x = torch.randn(num_rows, in_features, device=DEVICE, dtype=BF16)
            out = torch.empty(num_rows, out_features, device=DEVICE, dtype=BF16)
            rows.append(
                {
                    "what": f"{name} {out_features} x {in_features}, {num_rows} rows",
                    "us": timed(
                        lambda i, a=(x, weights, out): linear(a[0], a[1][i], out=a[2]), sets
                    ),
                    "torch_us": timed(
                        lambda i, a=(x, weights, out): torch.mm(a[0], a[1][i].t(), out=a[2]), sets
                    ),
                }
            )
        del weights
        torch.cuda.empty_cache()
    return rows


def layer_rows() -> list[dict[str, Any]]:
    """The small kernels of a layer of Qwen3-0.6B."""
    rows: list[dict[str, Any]] = []
    hidden, heads, kv_heads, mlp = 1024, 16, 8, 3072
    weight = torch.ones(hidden, device=DEVICE, dtype=BF16)
    norm = torch.ones(HEAD_SIZE, device=DEVICE, dtype=BF16)
    inv_freq = torch.rand(HEAD_SIZE // 2, device=DEVICE)
    cache = torch.zeros(2, 1024, BLOCK_SIZE, kv_heads, HEAD_SIZE, device=DEVICE, dtype=BF16)
    for count in (1, 32, 256, 8192):
        x, residual = torch.randn(2, count, hidden, device=DEVICE, dtype=BF16)
        out = torch.empty_like(x)
        qkv = torch.randn(count, (heads + 2 * kv_heads) * HEAD_SIZE, device=DEVICE, dtype=BF16)
        query = torch.empty(count, heads, HEAD_SIZE, device=DEVICE, dtype=BF16)
        slots = torch.randperm(1024 * BLOCK_SIZE, device=DEVICE)[:count]
        gate_up = torch.randn(count, 2 * mlp, device=DEVICE, dtype=BF16)
        activated = torch.empty(count, mlp, device=DEVICE, dtype=BF16)
        launches: dict[str, Launch] = {
            "add and RMS norm": lambda _, a=(x, residual, out): rms_norm(
                a[0], weight, eps=1e-6, residual=a[1], out=a[2]
            ),
            "norms, rotary, cache write": lambda _, a=(qkv, slots, query): rotary_and_cache(
                a[0], a[1], inv_freq, a[1], *cache, q_norm=norm, k_norm=norm, query=a[2]
            ),
            "SiLU and product": lambda _, a=(gate_up, activated): silu_mul(a[0], out=a[1]),
        }
        rows += [
            {"what": f"{name}, {count} tokens", "us": timed(launch, 1)}
            for name, launch in launches.items()
        ]
    return rows


def main() -> None:
    groups: dict[str, Callable[[float], list[dict[str, Any]]]] = {
        "attention": attention_rows,
        "ragged": ragged_rows,
        "delta": lambda _: delta_rows(),
        "sampling": lambda _: [row for count in (1, 32, 256) for row in sampling_rows(count)],
        "linear": lambda _: linear_rows(),
        "layer": lambda _: layer_rows(),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--only", help="comma-separated groups: " + ", ".join(groups))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: these benchmarks need one")
    torch.manual_seed(0)
    chosen = args.only.split(",") if args.only else list(groups)
    started = time.time()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
        "relative_errors": checks(),
        "copy_bytes_per_s": copy_bandwidth(),
    }
    print(
        f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}, {report['date']}\n"
        f"copy {report['copy_bytes_per_s'] / 1e12:.2f} TB/s, relative errors "
        f"{ {name: f'{error:.1e}' for name, error in report['relative_errors'].items()} }"
    )
    for name in chosen:
        report[name] = groups[name](report["copy_bytes_per_s"])
        show(report[name])
    report["seconds"] = round(time.time() - started)
    print(f"{report['seconds']} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
