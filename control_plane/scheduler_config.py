"""Limits of one replica's steps. Owns: their validation. Does not know: flags, workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one replica's steps.

    Attributes:
        max_num_seqs: Rows of the worker's persistent batch.
        max_num_batched_tokens: Most tokens in one step; at least max_num_seqs, so that every
            decoding row always fits.
        max_model_len: Longest sequence, prompt and output.
        max_bypass: How many requests may be admitted past one that does not fit, and how many
            of those that do not fit are looked at in one step.
        probation_tokens: Output tokens after which a request that was retried alone is believed to
            be harmless; more than steps can have been in flight at its loss.
        vocab_size: Token ids of results are below it.
        max_added_tokens: Known tokens of the sequences that one step adds, after which no further
            one is added. Cached tokens count, since all of them travel: a worker takes messages of
            64 MiB, four bytes are a token, and the last one to be added can be long.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_bypass: int = 16
    probation_tokens: int = 8
    vocab_size: int = (1 << 31) - 1
    max_added_tokens: int = 1 << 22

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs={self.max_num_seqs}, "
                f"got {self.max_num_batched_tokens}"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.max_added_tokens < 1:
            raise ValueError(f"max_added_tokens must be positive, got {self.max_added_tokens}")
        if self.max_bypass < 0:
            raise ValueError(f"max_bypass must not be negative, got {self.max_bypass}")
