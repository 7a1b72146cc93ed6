"""How long a step takes on a device that is not there.

Owns: the formula of a step's time, the profiles that were measured on real devices, and how a
profile is read. Does not know: rows, threads, tokens.

    step = step_us + row_us * rows + kv_token_us * tokens of context that decoding rows read
         + (prefill_step_us if it computes a prompt)
         + prefill_token_us * prompt tokens + prefill_pair_us * (prompt token, key it sees) pairs
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.model_fingerprint import read_json_object

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_UNITS_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
_MAX_STEP_US = 600e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationProfile:
    """A device as the control plane sees it: how long steps take and what it holds.

    Attributes:
        name: For people.
        step_us: Microseconds of every step that computes anything.
        row_us: For each row that draws a token.
        kv_token_us: For each token of context that a decoding row reads.
        prefill_step_us: Once for a step that computes part of a prompt.
        prefill_token_us: For each prompt token.
        prefill_pair_us: For each pair of a prompt token and a key it attends to.
        mean_output_tokens: A sequence that does not ignore end-of-sequence tokens gets one with a
            chance of 1 in so many per token; 0: it never does.
        num_blocks: KV blocks of 16 tokens, the null block included, unless a flag says otherwise.
        max_num_seqs: Rows, unless a flag says otherwise.
        max_num_batched_tokens: Tokens of one step, unless a flag says otherwise.
    """

    name: str
    step_us: float
    row_us: float = 0.0
    kv_token_us: float = 0.0
    prefill_step_us: float = 0.0
    prefill_token_us: float = 0.0
    prefill_pair_us: float = 0.0
    mean_output_tokens: float = 0.0
    num_blocks: int = 65_536
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                if not isinstance(value, str):
                    raise ValueError(f"a profile's name must be a text, got {value!r}")
                continue
            is_count = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_count else int | float):
                kind = "a whole number" if is_count else "a number"
                raise ValueError(f"profile {self.name}: {field.name} must be {kind}, got {value!r}")
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"profile {self.name}: {field.name} must be finite and not negative, "
                    f"got {value}"
                )
        if not 0 < self.step_us <= _MAX_STEP_US:
            raise ValueError(
                f"profile {self.name}: step_us must be in (0, {_MAX_STEP_US:g}], got {self.step_us}"
            )
        if 0 < self.mean_output_tokens < 1:
            raise ValueError(
                f"profile {self.name}: mean_output_tokens must be 0 (no end) or at least 1, got "
                f"{self.mean_output_tokens}"
            )
        if self.num_blocks < 2 or self.max_num_seqs < 1:
            raise ValueError(
                f"profile {self.name}: num_blocks must be at least 2 and max_num_seqs at least 1, "
                f"got {self.num_blocks} and {self.max_num_seqs}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"profile {self.name}: max_num_batched_tokens ({self.max_num_batched_tokens}) must "
                f"be at least max_num_seqs ({self.max_num_seqs})"
            )

    def step_time_us(
        self, *, num_rows: int, num_kv_tokens: int, num_prefill_tokens: int, num_pairs: int
    ) -> float:
        """Time of a step.

        Args:
            num_rows: Rows that draw a token.
            num_kv_tokens: Sum of the contexts that decoding rows read.
            num_prefill_tokens: Prompt tokens.
            num_pairs: Pairs of a prompt token and a key at or before it.
        """
        time_us = self.step_us + self.row_us * num_rows + self.kv_token_us * num_kv_tokens
        if num_prefill_tokens:
            time_us += (
                self.prefill_step_us
                + self.prefill_token_us * num_prefill_tokens
                + self.prefill_pair_us * num_pairs
            )
        return time_us


# Fitted to "One worker alone on an H200" of docs/performance.md as of 2026-11-30: decode steps at a
# context of 1 024 within 4 % from 32 rows on (0.6B with 1 row is 18 % too slow and with 8 rows 12 %
# too fast, which no line can help), first tokens within 1 %. The KV term is what attention took at
# 256 rows, the pair term what a long prompt took beyond a short one.
PROFILES = {
    "h200-0.6b": SimulationProfile(
        name="h200-0.6b",
        step_us=960.0,
        row_us=1.9,
        kv_token_us=0.0287,
        prefill_step_us=2_064.0,
        prefill_token_us=1.868,
        prefill_pair_us=6.131e-4,
        mean_output_tokens=256.0,
        num_blocks=65_536,
    ),
    "h200-8b": SimulationProfile(
        name="h200-8b",
        step_us=4_150.0,
        row_us=19.0,
        kv_token_us=0.0294,
        prefill_step_us=728.0,
        prefill_token_us=18.08,
        prefill_pair_us=2.261e-3,
        mean_output_tokens=256.0,
        num_blocks=51_200,
    ),
}


def read_profile(text: str) -> SimulationProfile:
    """Read the value of `--simulate`: a profile's name, a time per step, or a JSON file.

    Raises:
        ValueError: It is none of these, or the file holds nonsense.
    """
    if text in PROFILES:
        return PROFILES[text]
    if match := _DURATION.fullmatch(text):
        return SimulationProfile(name=text, step_us=float(match[1]) * _UNITS_US[match[2]])
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(
            f"--simulate must be one of {', '.join(PROFILES)}, a time per step such as 8ms, or "
            f"FILE.json, got {text!r}"
        )
    try:
        values: dict[str, Any] = read_json_object(path)
    except OSError as error:
        raise ValueError(f"--simulate: cannot read {path}: {error.strerror}") from None
    known = {field.name for field in dataclasses.fields(SimulationProfile)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"--simulate: {path} has unknown keys {', '.join(unknown)}; known: "
            f"{', '.join(sorted(known))}"
        )
    if "step_us" not in values:
        raise ValueError(f"--simulate: {path} has no step_us, the microseconds of every step")
    arguments: dict[str, Any] = {"name": path.stem, **values}
    return SimulationProfile(**arguments)
