"""Draws the next token of each row from its logits.

Owns: temperature, min_p, top_k, top_p and the random numbers. Does not know rows' histories, stop
conditions (a forbidden token comes with a logit of -inf) or what happens to the token.

Random numbers are counter based: a draw depends on the request's seed, the sequence index, the
position and the token id, and on nothing else. The same draw comes out in any batch, on any worker
and after any replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_TOKEN = -1
"""What `sample` gives for a row without a token to give: NaN, infinite, or every logit masked."""

PURPOSE_TOKEN = 0
"""Last word of the counter of draws made here; other uses of a seed take other numbers."""

_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# top_k and top_p rarely reach past the likeliest tokens: those are looked at first, then more of
# them, then all. Sorting 49 152 logits takes 5 ms on a CPU, finding the first 512 takes 0.3 ms.
_SHORTLISTS = (512, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of the rows that sample in one step, one entry per row.

    Attributes:
        temperature: [n] float32, >= 0; 0 takes the likeliest token.
        top_k: [n] int64 or int32; 0 keeps all tokens.
        top_p: [n] float32 in (0, 1]; 1 keeps all tokens.
        min_p: [n] float32 in [0, 1]; 0 keeps all tokens.
        seed: [n] int64, the 64 bits of the request's seed.
        sequence_index: [n] int64 or int32, index of the sequence within its request.
        position: [n] int64, index in the sequence of the token that is drawn.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sequence_index: torch.Tensor
    position: torch.Tensor

    def select(self, rows: torch.Tensor) -> SamplingBatch:
        """Gives the parameters of some rows, by [m] int64 index."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            sequence_index=self.sequence_index[rows],
            position=self.position[rows],
        )


@torch.inference_mode()
def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draws one token per row: temperature, then min_p, then top_k, then top_p.

    Ties go to the lowest id, in the arg-max and at the edges of top_k and top_p.

    Args:
        logits: [n, vocab_size] float32; not changed. -inf marks a token that must not come.
        batch: Parameters of the n rows.

    Returns:
        [n] int64; NO_TOKEN for a row that has a NaN or +inf, or nothing but -inf.
    """
    highest, tokens = logits.max(dim=-1)
    # max propagates NaN, so one look at the maximum judges the row.
    usable = torch.isfinite(highest)
    random = usable & (batch.temperature > 0)
    filtered = random & ((batch.top_k > 0) | (batch.top_p < 1))
    plain = random & ~filtered
    for chosen, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
        rows = chosen.nonzero().view(-1)
        if rows.numel():
            part = batch.select(rows)
            scores = _scaled(logits[rows], highest[rows], part)
            tokens.index_copy_(0, rows, draw(scores, part))
    return torch.where(usable, tokens, NO_TOKEN)


def philox_4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives four random 32-bit words per counter: Philox-4x32-10.

    Args:
        counter: Four int64 tensors that broadcast together, values in [0, 2**32).
        key: Two of the same kind.

    Returns:
        Four int64 tensors, values in [0, 2**32).

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps to the right 64 bits; the shift's sign bits are masked off.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK_32) ^ c1 ^ k0,
            p1 & _MASK_32,
            ((p0 >> 32) & _MASK_32) ^ c3 ^ k1,
            p0 & _MASK_32,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK_32, (k1 + _KEY_STEPS[1]) & _MASK_32
    return c0, c1, c2, c3


def gumbel_noise(token_ids: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Gives the noise of the given tokens: counter (id // 4, position, sequence, purpose).

    Args:
        token_ids: [n, m] int64.
        batch: Parameters of the n rows.

    Returns:
        [n, m] float32 Gumbel variates; token id's is word id % 4 of its counter.
    """
    words = torch.stack(_random_words(token_ids >> 2, batch), dim=-1)
    return _to_gumbel(words.gather(-1, (token_ids & 3)[..., None]).squeeze(-1))


def _draw_plain(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    vocab_size = scores.shape[-1]
    # One counter serves four neighbouring ids.
    quads = torch.arange((vocab_size + 3) // 4, device=scores.device)[None, :]
    words = torch.stack(_random_words(quads, batch), dim=-1).flatten(1)
    return (scores + _to_gumbel(words[:, :vocab_size])).argmax(dim=-1)


def _draw_filtered(scores: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    vocab_size = scores.shape[-1]
    tokens = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    rows = torch.arange(scores.shape[0], device=scores.device)
    for size in (*(size for size in _SHORTLISTS if size < vocab_size), vocab_size):
        part, values = batch.select(rows), scores[rows]
        values, ids = _shortlist(values, size)
        kept, complete = _keep(values, scores[rows], part)
        if size == vocab_size:
            complete = torch.ones_like(complete)
        noisy = torch.where(kept, values, float("-inf")) + gumbel_noise(ids, part)
        drawn = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).view(-1)
        tokens[rows[complete]] = drawn[complete]
        rows = rows[~complete]
        if not rows.numel():
            break
    return tokens


def _shortlist(scores: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the `size` highest scores and their ids, descending, ties by id."""
    if size == scores.shape[-1]:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(size, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep(
    values: torch.Tensor, scores: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies top_k, then top_p, to descending values.

    Returns:
        Which values stay, [n, m] bool, and for which rows the cut is certain, [n] bool: it lies
        before the last value and is not among its ties, of which others may be left out.
    """
    size, vocab_size = values.shape[-1], scores.shape[-1]
    ranks = torch.arange(size, device=values.device)[None, :]
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size)[:, None]
    kept = (ranks < top_k) & (values > float("-inf"))
    weights = torch.where(kept, values, float("-inf")).exp()
    # Without top_k the mass of the tail counts too.
    total = torch.where(
        top_k < size, weights.sum(-1, keepdim=True), scores.exp().sum(-1, keepdim=True)
    )
    before = weights.cumsum(-1) - weights
    kept &= (before < batch.top_p[:, None] * total) | (batch.top_p >= 1)[:, None] | (ranks == 0)
    last_kept = kept.sum(-1, keepdim=True) - 1
    certain = values.gather(1, last_kept) > values[:, -1:]
    exhausted = values[:, -1:] == float("-inf")
    return kept, (certain | exhausted).view(-1)


def _scaled(logits: torch.Tensor, highest: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Applies temperature and min_p; the highest score becomes 0, so nothing overflows."""
    scores = (logits - highest[:, None]) / batch.temperature[:, None]
    # p >= min_p * p_max, in logarithms; log(0) keeps everything.
    return torch.where(scores >= batch.min_p.log()[:, None], scores, float("-inf"))


def _random_words(
    quads: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    counter = (
        quads,
        batch.position.to(torch.int64)[:, None] & _MASK_32,
        batch.sequence_index.to(torch.int64)[:, None] & _MASK_32,
        torch.full_like(quads[:1, :1], PURPOSE_TOKEN),
    )
    key = (batch.seed[:, None] & _MASK_32, (batch.seed[:, None] >> 32) & _MASK_32)
    return philox_4x32(counter, key)


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    # -log(E) with E exponential. Large noise comes from small uniforms, where fp32 is finest; the
    # upper end is kept below 1 so that the noise stays finite.
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
