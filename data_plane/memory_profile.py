"""How much device memory a step needs beside weights and KV cache, found by running the largest.

Owns: the measurement. Does not know what is done with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.attention.base import AttentionInputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from data_plane.attention.base import AttentionBackend
    from data_plane.models.llama import LlamaModel
    from data_plane.resident_steps import ResidentSteps


_SMALL_BUFFERS_BYTES = 16 << 20  # rows' state, staging, slots
# The allocator takes whole segments, and not always the same ones.
_FRAGMENTATION_BYTES = 64 << 20


@torch.inference_mode()
def measure_activation_bytes(
    model: LlamaModel,
    backend: AttentionBackend,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> int:
    """Peak bytes that one step of the largest size allocates on the model's CUDA device.

    The step is as many sequences as need to be, as long as may be, each with its logits, over a
    cache of one block: it reads the null block and writes nowhere.
    """
    device = model.device
    tokens_per_seq = min(max_model_len, max_num_batched_tokens)
    num_full = max_num_batched_tokens // tokens_per_seq
    lengths = [tokens_per_seq] * num_full + [max_num_batched_tokens - num_full * tokens_per_seq]
    seq_lens = np.array([length for length in lengths if length], np.int32)
    query_start_loc = np.zeros(seq_lens.size + 1, np.int32)
    np.cumsum(seq_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    max_blocks = -(-tokens_per_seq // backend.spec.block_size)
    spec, num_layers = backend.spec, model.config.num_layers
    shape = backend.get_kv_cache_shape(1, spec.block_size, spec.num_kv_heads, spec.head_size)
    kv_cache = torch.zeros(shape, dtype=spec.dtype, device=device)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    attention = AttentionInputs(
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_tables=torch.zeros((seq_lens.size, max_blocks), dtype=torch.int32, device=device),
        slot_mapping=torch.full_like(zeros, -1),
        positions=zeros,
        max_query_len=tokens_per_seq,
        max_seq_len=tokens_per_seq,
        num_tokens=num_tokens,
        query_start_loc_host=query_start_loc,
        seq_lens_host=seq_lens,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits_rows = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
    logits = model.forward(
        zeros,
        zeros,
        [kv_cache] * num_layers,
        backend,
        backend.build_metadata(attention),
        logits_rows,
    )
    # The sampler works on copies of the logits: noise, sorted values, their indices.
    num_bytes = torch.cuda.max_memory_allocated(device) - before + 4 * logits.nbytes
    # The block table and the part of it that a step gathers.
    num_bytes += 2 * 4 * (max_num_seqs + 1) * -(-max_model_len // spec.block_size)
    num_bytes += _SMALL_BUFFERS_BYTES
    del logits
    torch.cuda.empty_cache()
    return num_bytes


# Graphs captured on trial: those that grow the shared pool, and as many that only add nodes.
_TRIAL_GRAPHS = 4


@torch.inference_mode()
def measure_resident_bytes(
    new_steps: Callable[[], ResidentSteps], backend: AttentionBackend, num_layers: int
) -> int:
    """Bytes that steps of every size and their graphs will take on the current CUDA device.

    The largest parts run, and the largest graphs are captured, over a cache of one block; the other
    graphs share the pool of those and are counted by what some of them add.
    """
    spec = backend.spec
    device = spec.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    steps = new_steps()
    shape = backend.get_kv_cache_shape(1, spec.block_size, spec.num_kv_heads, spec.head_size)
    kv_caches = [torch.zeros(shape, dtype=spec.dtype, device=device)] * num_layers
    steps.run_largest(kv_caches)
    others_bytes = 0
    if steps.captures:
        parts = steps.captured_parts()
        largest = [part for part in steps.largest_parts() if part in parts]
        for part in (*largest, *(part for part in parts[:1] if part not in largest)):
            steps.capture(part, kv_caches)
        before = _bytes_in_use(device)
        rest = [part for part in parts if part not in largest][1:]
        trial = rest[:: max(1, len(rest) // _TRIAL_GRAPHS)]
        for part in trial:
            steps.capture(part, kv_caches)
        per_graph = (_bytes_in_use(device) - before) / max(1, len(trial))
        others_bytes = round(per_graph * (len(rest) - len(trial)))
    peak = _bytes_in_use(device)
    steps.drop_graphs()
    del steps, kv_caches
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # What stays, such as loaded kernels, is in use by the time the cache is planned.
    return peak - _bytes_in_use(device) + others_bytes + _FRAGMENTATION_BYTES


def _bytes_in_use(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
