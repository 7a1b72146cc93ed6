"""Drives a model over a paged cache as a worker would, with every physical block poisoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from data_plane.attention.base import AttentionBackend, AttentionInputs, select_backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from data_plane.models.loader import LoadedModel


def attention_inputs(
    *,
    num_computed: Sequence[int],
    num_new: Sequence[int],
    block_tables: np.ndarray,
    block_size: int,
    num_padding: int = 0,
    device: str = "cpu",
) -> AttentionInputs:
    """Describes one step of some sequences; a sequence with nothing computed and new is empty."""
    computed, new = np.array(num_computed), np.array(num_new)
    query_start_loc = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    seq_lens = (computed + new).astype(np.int32)
    reqs = np.repeat(np.arange(len(new)), new)
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(computed, new, strict=True)])
    positions = positions.astype(np.int64)
    slots = block_tables[reqs, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    pad = np.zeros(num_padding, np.int64)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return AttentionInputs(
        query_start_loc=tensor(query_start_loc),
        seq_lens=tensor(seq_lens),
        block_tables=tensor(block_tables.astype(np.int32)),
        slot_mapping=tensor(np.concatenate([slots, pad - 1])),
        positions=tensor(np.concatenate([positions, pad])),
        max_query_len=int(new.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        num_tokens=int(query_start_loc[-1]) + num_padding,
        query_start_loc_host=query_start_loc,
        seq_lens_host=seq_lens,
    )


def scattered_tables(
    num_reqs: int, blocks_per_req: int, num_blocks: int, seed: int = 0
) -> np.ndarray:
    """Gives each request its own blocks, in no order, never the null block: [n, m] int32."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks))
    return ids[: num_reqs * blocks_per_req].reshape(num_reqs, blocks_per_req).astype(np.int32)


def null_padded(block_tables: np.ndarray, seq_lens: Sequence[int], block_size: int) -> np.ndarray:
    """Points entries past each sequence to the null block, as a worker's table does."""
    columns = np.arange(block_tables.shape[1])[None, :]
    used = -(-np.array(seq_lens) // block_size)
    return np.where(columns < used[:, None], block_tables, 0)


class PagedModel:
    """A loaded model and a cache full of NaN: whatever is read without being written shows."""

    def __init__(self, loaded: LoadedModel, *, block_size: int, num_blocks: int = 64) -> None:
        self.model = loaded.model
        self.block_size = block_size
        self.backend: AttentionBackend = select_backend(loaded.model.attention_spec(block_size))
        config = loaded.config
        shape = self.backend.get_kv_cache_shape(
            num_blocks, block_size, config.num_kv_heads, config.head_size
        )
        self.kv_caches = [
            torch.full(shape, float("nan"), dtype=self.model.dtype)
            for _ in range(config.num_layers)
        ]

    def step(
        self,
        token_ids: Sequence[Sequence[int]],
        num_computed: Sequence[int],
        block_tables: np.ndarray,
        *,
        last_only: bool = False,
    ) -> list[torch.Tensor]:
        """Runs new tokens of some sequences; gives [num_new or 1, vocab_size] logits of each."""
        num_new = [len(ids) for ids in token_ids]
        seq_lens = [a + n for a, n in zip(num_computed, num_new, strict=True)]
        inputs = attention_inputs(
            num_computed=num_computed,
            num_new=num_new,
            block_tables=null_padded(block_tables, seq_lens, self.block_size),
            block_size=self.block_size,
        )
        ends = np.cumsum(num_new)
        rows = ends - 1 if last_only else np.arange(inputs.num_tokens)
        with torch.inference_mode():
            logits = self.model.forward(
                torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64),
                inputs.positions,
                self.kv_caches,
                self.backend,
                self.backend.build_metadata(inputs),
                torch.from_numpy(rows.astype(np.int64)),
            )
        return list(logits.split(1 if last_only else num_new))

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts in one batch; stops at nothing."""
        longest = max(map(len, prompts)) + num_tokens
        per_req = -(-longest // self.block_size)
        num_blocks = self.kv_caches[0].shape[1]
        tables = scattered_tables(len(prompts), per_req, num_blocks)
        outputs: list[list[int]] = [[] for _ in prompts]
        new: list[list[int]] = list(prompts)
        computed = [0] * len(prompts)
        for _ in range(num_tokens):
            logits = self.step(new, computed, tables, last_only=True)
            computed = [a + len(ids) for a, ids in zip(computed, new, strict=True)]
            new = [[int(row.argmax())] for row in logits]
            for output, ids in zip(outputs, new, strict=True):
                output += ids
        return outputs
