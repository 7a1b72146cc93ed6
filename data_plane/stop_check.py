"""When a sequence ends, decided on the device for all rows of a step at once.

Owns: the rules of EOS, stop tokens, min_tokens and the length limit. Does not know stop strings
(the control plane finds those) or how tokens are drawn.

Positions count from the start of the sequence. A token sampled at index t makes the sequence
t + 1 tokens long.
"""

from __future__ import annotations

import torch

from data_plane.sampler import NO_TOKEN

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
        stop_ids: [n, width] int32 as `RowState` keeps them; disarmed ones are masked too.
        sampled_index: [n] int32, index of the token about to be drawn.
        min_total: [n] int32, prompt + min_tokens.
    """
    ids = torch.where(stop_ids < -1, -2 - stop_ids, stop_ids)
    is_masked = (sampled_index < min_total).unsqueeze(1) & (ids >= 0)
    # The minimum with +inf changes nothing, so unused entries may all point to token 0.
    ceiling = torch.where(is_masked, -torch.inf, torch.inf)
    logits.scatter_reduce_(1, ids.clamp(min=0).long(), ceiling, reduce="amin")


def finish_reasons(
    token_ids: torch.Tensor,
    stop_ids: torch.Tensor,
    sampled_index: torch.Tensor,
    max_total: torch.Tensor,
) -> torch.Tensor:
    """Why each row ends with the token it just got; 0 where it goes on.

    Args:
        token_ids: [n] int32, the tokens drawn; NO_TOKEN where the logits gave none.
        stop_ids: [n, width] int32 as `RowState` keeps them; negative ones end nothing.
        sampled_index: [n] int32, index of token_ids in the sequence.
        max_total: [n] int32, longest the sequence may become.

    Returns:
        [n] int32.
    """
    # NO_TOKEN equals unused entries: the error is written last.
    is_stop = (stop_ids == token_ids.unsqueeze(1)).any(dim=1)
    reasons = (sampled_index + 1 >= max_total).int() * FINISH_LENGTH
    reasons.masked_fill_(is_stop, FINISH_STOP)
    return reasons.masked_fill_(token_ids == NO_TOKEN, FINISH_ERROR)
