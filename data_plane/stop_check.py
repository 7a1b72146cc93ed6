"""When a sequence ends, decided on the device for all rows of a step at once.

Owns: the rules of EOS, stop tokens, min_tokens and the length limit. Does not know stop strings
(the control plane finds those) or how tokens are drawn.

Positions count from the start of the sequence. A token sampled at index t makes the sequence
t + 1 tokens long.
"""

from __future__ import annotations

import torch

# Values of the wire's FinishReason; 0: goes on.
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_ERROR = 4


def mask_stop_ids(
    logits: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled_index: torch.Tensor,
    min_total: torch.Tensor,
) -> None:
    """Make stop ids impossible for rows that have not yet got their min_tokens.

    Args:
        logits: [n, vocab_size] float32, changed in place.
        stop_ids: [n, width] int32, -1 where unused; others are inside the vocabulary.
        sampled_index: [n] int32, index of the token about to be drawn.
        min_total: [n] int32, prompt + min_tokens.
    """
    is_masked = (sampled_index < min_total).unsqueeze(1) & (stop_ids >= 0)
    # The minimum with +inf changes nothing, so unused entries may all point to token 0.
    ceiling = torch.where(is_masked, -torch.inf, torch.inf)
    logits.scatter_reduce_(1, stop_ids.clamp(min=0).long(), ceiling, reduce="amin")


def finish_reasons(
    token_ids: torch.Tensor,
    is_usable: torch.Tensor,
    stop_ids: torch.Tensor,
    num_stop_ids: torch.Tensor,
    sampled_index: torch.Tensor,
    max_total: torch.Tensor,
) -> torch.Tensor:
    """Why each row ends with the token it just got; 0 where it goes on.

    Args:
        token_ids: [n] int32, the tokens drawn.
        is_usable: [n] bool, whether the row's logits were finite.
        stop_ids: [n, width] int32; entries from num_stop_ids on do not end the row.
        num_stop_ids: [n] int32.
        sampled_index: [n] int32, index of token_ids in the sequence.
        max_total: [n] int32, longest the sequence may become.

    Returns:
        [n] int32.
    """
    entry = torch.arange(stop_ids.shape[1], dtype=torch.int32, device=stop_ids.device)
    is_armed = entry < num_stop_ids.unsqueeze(1)
    is_stop = ((stop_ids == token_ids.unsqueeze(1)) & is_armed).any(dim=1)
    reasons = torch.where(sampled_index + 1 >= max_total, FINISH_LENGTH, 0)
    reasons.masked_fill_(is_stop, FINISH_STOP)
    return reasons.masked_fill_(~is_usable, FINISH_ERROR).int()
