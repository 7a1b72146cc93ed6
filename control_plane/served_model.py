"""The models this control plane serves, as the engine and the edge need to know them.

Owns nothing that changes. Does not know files, tokenizers or replicas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model that clients can name and workers can attach for.

    Attributes:
        name: What clients use.
        base_fingerprint: 32 bytes of `protos.model_fingerprint.base_fingerprint`; what a worker
            reports is this bound to its KV dtype.
        max_model_len: Limit for prompt and output together, in tokens.
        vocab_size: Token ids are in [0, vocab_size).
        eos_token_ids: Tokens that end a sequence unless it ignores them.
    """

    name: str
    base_fingerprint: bytes
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a served model needs a name")
        if len(self.base_fingerprint) != 32:
            raise ValueError(
                f"base_fingerprint must have 32 bytes, got {len(self.base_fingerprint)}"
            )
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, got {self.vocab_size}")
