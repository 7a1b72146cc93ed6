"""The requests of a run, the same ones for the same parameters, in however many processes.

A job is what is sent one after the other: a single request, or the turns of a conversation. Each
is a function of the seed and its number alone, so that processes can share them out by number.

Owns: prompts, lengths, arrival times. Does not know: calls, clocks.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from pagewire_client.bench.lengths import MAX_LENGTH, parse_lengths

if TYPE_CHECKING:
    from pagewire_client.bench.config import BenchConfig

# Below this, ids are often special tokens and bytes.
_FIRST_ID = 100
_HIGH_ID = 10_000
_DECODE_CONTEXT, _DECODE_STEPS = 1024, 128
# Common words, which most vocabularies have as one token each.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were her all she there would their we him been has when who will "
    "more no if out so said what up its about into than them can only other new some could time "
    "these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get "
    "here between both life being under never day same another know while last might us great old "
    "year off come since against go came right used take three"
)
_WORDS = _TEXT.split()

Prompt = list[int] | str


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a job: what is new in its prompt, and how much is wanted."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that follow each other; `at_s` is when the first one is due, from the start."""

    index: int
    at_s: float
    turns: tuple[Turn, ...]


class Workload:
    """All jobs of a run."""

    def __init__(self, config: BenchConfig) -> None:
        """Prepare what is not made job by job.

        Raises:
            ValueError: The trace cannot be read; the message names file and line.
            OSError: Likewise.
        """
        self._config = config
        self._prompt_lengths = parse_lengths(config.prompt_lengths, is_output=False)
        self._output_lengths = parse_lengths(config.output_lengths, is_output=True)
        self._prefixes: dict[str, Prompt] = {}
        self._jobs: list[Job] | None = None
        if config.workload == "burst-256":
            self._jobs = _burst_requests()
        elif config.workload == "decode-rows":
            self._jobs = _decode_rows(config.batch)
        elif config.workload == "trace":
            self._jobs = self._read_trace(Path(config.trace))
        per_job = config.turns if config.workload == "multi-turn" else 1
        self.turns_per_job = per_job
        self.num_jobs = (
            len(self._jobs) if self._jobs is not None else -(-config.num_requests // per_job)
        )
        if config.workload == "trace":
            self.num_jobs = min(self.num_jobs, config.num_requests)
        self._arrivals_s = self._draw_arrivals()

    @property
    def num_requests(self) -> int:
        return self.num_jobs * self.turns_per_job

    def arrival_s(self, index: int) -> float:
        """When a job is due, in seconds from the start."""
        if self._arrivals_s:
            return self._arrivals_s[index]
        if self._jobs is not None and self._config.arrivals == "trace":
            return self._jobs[index].at_s
        return 0.0

    def job(self, index: int) -> Job:
        """The job of that number, 0 <= index < num_jobs."""
        if self._jobs is not None:
            job = self._jobs[index]
            return Job(index, self.arrival_s(index), job.turns)
        config = self._config
        rng = Random(f"{config.seed}/{index}")
        if config.workload == "multi-turn":
            turns = tuple(self._turn(rng) for _ in range(config.turns))
        elif config.workload == "shared-prefix":
            group = rng.randrange(config.prefix_groups)
            turn = self._turn(rng)
            prefix = self._prefix(str(group), config.prefix_length)
            turns = (Turn(joined(prefix, turn.prompt), turn.max_tokens),)
        else:
            turns = (self._turn(rng),)
        return Job(index, self.arrival_s(index), turns)

    def _turn(self, rng: Random) -> Turn:
        prompt_length = self._prompt_lengths.draw(rng)
        max_tokens = self._output_lengths.draw(rng)
        return Turn(self._words(rng, prompt_length), max_tokens)

    def _words(self, rng: Random, count: int) -> Prompt:
        config = self._config
        if config.as_text:
            return " ".join(rng.choices(_WORDS, k=count))
        high = config.vocab_size or _HIGH_ID
        return rng.choices(range(min(_FIRST_ID, high - 1), high), k=count)

    def _prefix(self, name: str, length: int) -> Prompt:
        key = f"{name}/{length}"
        if key not in self._prefixes:
            rng = Random(f"{self._config.seed}/prefix/{name}")
            self._prefixes[key] = self._words(rng, length)
        return self._prefixes[key]

    def _draw_arrivals(self) -> list[float]:
        config = self._config
        if config.arrivals != "poisson":
            return []
        rng = Random(f"{config.seed}/arrivals")
        times: list[float] = []
        at_s = 0.0
        for _ in range(self.num_jobs):
            at_s += rng.expovariate(config.rate)
            times.append(at_s)
        return times

    def _read_trace(self, path: Path) -> list[Job]:
        jobs: list[Job] = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if len(jobs) >= self._config.num_requests:
                    break
                if line.strip():
                    try:
                        jobs.append(self._trace_job(len(jobs), line))
                    except ValueError as error:
                        raise ValueError(f"--trace {path}, line {number}: {error}") from None
        if not jobs:
            raise ValueError(f"--trace {path} holds no request")
        if any(later.at_s < job.at_s for job, later in itertools.pairwise(jobs)):
            raise ValueError(f"--trace {path}: at_s must not go back from one line to the next")
        return jobs

    def _trace_job(self, index: int, line: str) -> Job:
        parsed: object = json.loads(line)
        if not isinstance(parsed, dict):
            raise ValueError("must be a JSON object")
        values = cast("dict[str, Any]", parsed)
        known = {
            *("at_s", "prompt", "token_ids", "prompt_tokens", "prefix", "prefix_tokens"),
            "output_tokens",
        }
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        at_s = values.get("at_s", 0.0)
        if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < 1e9:
            raise ValueError(f"at_s must be seconds from the start, got {at_s!r}")
        max_tokens = _length(values, "output_tokens")
        given = [name for name in ("prompt", "token_ids", "prompt_tokens") if name in values]
        if len(given) != 1:
            raise ValueError("exactly one of prompt, token_ids and prompt_tokens is needed")
        prompt: Any = values[given[0]]
        if given[0] == "prompt_tokens":
            rng = Random(f"{self._config.seed}/{index}")
            prompt = self._words(rng, _length(values, "prompt_tokens"))
        elif given[0] == "prompt":
            if not isinstance(prompt, str) or not prompt:
                raise ValueError("prompt must be a text")
        elif not isinstance(prompt, list) or not all(type(i) is int for i in prompt) or not prompt:
            raise ValueError("token_ids must be a list of whole numbers")
        if "prefix" in values:
            prefix = self._prefix(str(values["prefix"]), _length(values, "prefix_tokens"))
            if type(prefix) is not type(prompt):
                raise ValueError("prefix is of token ids, or of words with --text; prompt is not")
            prompt = joined(prefix, prompt)
        return Job(index, float(at_s), (Turn(prompt, max_tokens),))


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt behind the other; both are of one kind."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}" if first else second
    return [*cast("list[int]", first), *cast("list[int]", second)]


def _length(values: dict[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be a whole number in [1, {MAX_LENGTH}], got {value!r}")
    return value


def _burst_requests() -> list[Job]:
    """256 prompts and outputs of 100 to 1 024 tokens, as nano-vllm's published benchmark has them.

    All numbers come from one generator in that order: 142 827 prompt and 133 966 output tokens.
    """
    rng = Random(0)
    prompts = [
        [rng.randint(0, _HIGH_ID) for _ in range(rng.randint(100, 1024))] for _ in range(256)
    ]
    return [
        Job(index, 0.0, (Turn(list(prompt), rng.randint(100, 1024)),))
        for index, prompt in enumerate(prompts)
    ]


def _decode_rows(batch: int) -> list[Job]:
    """Rows that decode together at a context of about 1 024 tokens."""
    rng = Random(100 + batch)
    length = _DECODE_CONTEXT - _DECODE_STEPS // 2
    # Early prompts decode while late ones are in prefill, so some more are asked for.
    max_tokens = _DECODE_STEPS + 8 + batch // 8
    return [
        Job(index, 0.0, (Turn([rng.randint(0, _HIGH_ID) for _ in range(length)], max_tokens),))
        for index in range(batch)
    ]
