"""What one run of `pagewire bench` is asked to do.

Owns: the parameters, which of them fit together, and their form in JSON (results, and the way to
further processes). Does not know: flags, calls.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from pagewire_client.bench.lengths import parse_lengths

WORKLOADS = ("random", "shared-prefix", "multi-turn", "trace")
# The workloads that the figures of docs/performance.md are measured with.
FIXED_WORKLOADS = ("burst-256", "decode-rows")
ARRIVALS = ("closed", "poisson", "burst", "trace")
MAX_REQUESTS = 1_000_000
MAX_PROCESSES = 64
# What a server holds of one batch stream before it reads on.
BATCH_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Parameters of a run; with the same ones every run sends the same requests.

    Attributes:
        server: host:port.
        model: Name; empty: the only one.
        workload: One of WORKLOADS or FIXED_WORKLOADS.
        arrivals: "closed": `concurrency` requests are always under way; "poisson": they come at
            `rate` whatever happens to the earlier ones; "burst": all at once; "trace": when the
            file says.
        concurrency: Of the closed loop, over all processes; else the most that are under way, 0
            for no limit.
        rate: Requests per second.
        num_requests: Sent at most (conversations of a multi-turn workload count every turn).
        duration_s: None is sent later than this; 0: no such limit.
        drain_s: How long those under way then may take.
        timeout_s: Of a single request.
        warmup: Requests sent before, one after the other, and not counted.
        prompt_lengths: See `lengths`; of the part that no other request shares.
        output_lengths: Likewise.
        prefix_length: Tokens that a group of requests shares.
        prefix_groups: How many such groups there are.
        turns: Of a conversation.
        think_s: Pause between an answer and the next turn.
        trace: Path of a JSONL file.
        batch: Decoding rows of "decode-rows".
        as_text: Prompts are words instead of token ids.
        vocab_size: Token ids are below this; 0: as the server says.
        via: "stream": Generate; "batch": GenerateBatch, which gives no times of tokens.
        flush_ms: How long the server may gather tokens.
        temperature: 0 is greedy.
        ignore_eos: Outputs have the drawn length exactly.
        seed: Of the workload and of sampling.
        cache_salt: Prefixes are found within it only; a new one for every run makes runs alike.
        processes: That send.
        channels: Connections of each.
        slo_ttft_ms: A good request has its first token by then; 0: no matter.
        slo_itl_ms: And this mean time between tokens at most; 0: no matter.
    """

    server: str
    model: str = ""
    workload: str = "random"
    arrivals: str = "closed"
    concurrency: int = 32
    rate: float = 0.0
    num_requests: int = 256
    duration_s: float = 0.0
    drain_s: float = 30.0
    timeout_s: float = 600.0
    warmup: int = 1
    prompt_lengths: str = "sharegpt"
    output_lengths: str = "sharegpt"
    prefix_length: int = 1024
    prefix_groups: int = 1
    turns: int = 4
    think_s: float = 0.0
    trace: str = ""
    batch: int = 32
    as_text: bool = False
    vocab_size: int = 0
    via: str = "stream"
    flush_ms: float = 0.0
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    cache_salt: str = ""
    processes: int = 1
    channels: int = 1
    slo_ttft_ms: float = 0.0
    slo_itl_ms: float = 0.0

    def __post_init__(self) -> None:
        self._check_choices()
        for name, low, high in (
            ("concurrency", 0, 1_000_000),
            ("num_requests", 1, MAX_REQUESTS),
            ("warmup", 0, MAX_REQUESTS),
            ("prefix_length", 1, 1 << 20),
            ("prefix_groups", 1, MAX_REQUESTS),
            ("turns", 1, 10_000),
            ("batch", 1, 100_000),
            ("processes", 1, MAX_PROCESSES),
            ("channels", 1, 256),
            ("seed", 0, (1 << 63) - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{flag(name)} must be in [{low}, {high}]")
        for name in (
            *("rate", "duration_s", "drain_s", "think_s", "flush_ms", "temperature"),
            *("slo_ttft_ms", "slo_itl_ms"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} must be finite and not negative")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError("--timeout-s must be positive")
        parse_lengths(self.prompt_lengths, is_output=False)
        parse_lengths(self.output_lengths, is_output=True)
        self._check_combinations()

    def _check_choices(self) -> None:
        for name, choices in (
            ("workload", WORKLOADS + FIXED_WORKLOADS),
            ("arrivals", ARRIVALS),
            ("via", ("stream", "batch")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{flag(name)} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    def _check_combinations(self) -> None:
        if (self.arrivals == "poisson") != (self.rate > 0):
            raise ValueError("--rate belongs to --arrivals poisson: give both or none")
        if self.arrivals == "closed" and self.concurrency < 1:
            raise ValueError("--concurrency must be at least 1 in a closed loop")
        if (self.workload == "trace") != bool(self.trace):
            raise ValueError("--workload trace needs --trace FILE.jsonl, and no other does")
        if self.arrivals == "trace" and self.workload != "trace":
            raise ValueError("--arrivals trace needs --workload trace: times come from its file")
        if self.workload == "multi-turn" and self.via == "batch":
            raise ValueError("--workload multi-turn needs --via stream")
        if self.as_text and self.workload in FIXED_WORKLOADS:
            raise ValueError(f"--text does not fit --workload {self.workload}: it is of token ids")
        if self.via == "batch" and (self.slo_ttft_ms or self.slo_itl_ms):
            raise ValueError("--via batch has no times of tokens, so no --slo-... can be met")

    def to_json(self) -> dict[str, Any]:
        """All parameters."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BenchConfig:
        """What `to_json` gave."""
        return cls(**values)


def flag(name: str) -> str:
    """The flag that sets a parameter."""
    names = {"num_requests": "requests", "prefix_length": "prefix-len", "as_text": "text"}
    return "--" + names.get(name, name.replace("_", "-"))
