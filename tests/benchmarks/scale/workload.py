"""Who asks what: sessions that arrive by a Poisson process and come back with longer prompts.

| kind | share of requests | prompt | answer | comes back |
|---|---|---|---|---|
| one-shot | 30 % | system prompt (Zipf) + 256-1 536 of its own | 65-321 | no |
| chat | 35 % | system prompt (Zipf) + history + 128-896 | 65-321 | 4 turns in the mean |
| agent | 25 % | tools, 3 072-8 192 (Zipf) + history + 256-1 536 | 17-129 | 8 steps |
| unique | 10 % | 1 024-4 096, shared with nobody | 65-321 | no |

Prompts are whole numbers of blocks and answers one token longer than that (the last token of an
answer is never fed), so that a cache can be kept by segments; see `prefix_cache`.

Owns: sizes, shares, randomness. Does not know: replicas, time beyond think times.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tests.benchmarks.scale.prefix_cache import Segment

if TYPE_CHECKING:
    from tests.benchmarks.scale.service_model import Device

BLOCK_SIZE = 16
_MAX_PROMPT_BLOCKS = 768


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of session. Sizes in blocks, inclusive.

    Attributes:
        share: Of all requests.
        pool: Whose first segment it starts with: "system", "agent" or "" for its own.
        question: Of a turn.
        answer: Full blocks of an answer, which has one token more.
        mean_turns: Geometrically distributed.
        think_s: Mean time from an answer to the next question, exponentially distributed.
    """

    name: str
    share: float
    pool: str
    question: tuple[int, int]
    answer: tuple[int, int]
    mean_turns: float = 1.0
    think_s: float = 0.0


# Think times are a quarter of what people need, as the simulated caches are a quarter of an H200's:
# what counts is how much of a cache is replaced until somebody comes back.
KINDS = (
    Kind(name="one-shot", share=0.30, pool="system", question=(16, 96), answer=(4, 20)),
    Kind(name="chat", share=0.35, pool="system", question=(8, 56), answer=(4, 20),
         mean_turns=4.0, think_s=4.0),
    Kind(name="agent", share=0.25, pool="agent", question=(16, 96), answer=(1, 8),
         mean_turns=8.0, think_s=0.5),
    Kind(name="unique", share=0.10, pool="", question=(64, 256), answer=(4, 20)),
)  # fmt: skip
_POOL_BLOCKS = {"system": (16, 96), "agent": (192, 512)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """How much is shared.

    Attributes:
        num_system_prompts: Distinct ones, each of 256-1 536 tokens.
        num_agent_prefixes: Distinct ones, each of 3 072-8 192 tokens.
        zipf_exponent: Popularity of the k-th is proportional to k ** -exponent.
        hot_share: This share of all sessions starts with one and the same prefix.
        seed: Of everything random.
    """

    num_system_prompts: int
    num_agent_prefixes: int
    zipf_exponent: float = 1.0
    hot_share: float = 0.0
    seed: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """A conversation in progress.

    Attributes:
        key: 64 bits of its first segment: what placement hashes.
        own_key: 64 bits of its own.
        home: The control plane its connection leads to; -1 until it is known.
    """

    kind: Kind
    key: int
    own_key: int
    turns_left: int
    chain: tuple[Segment, ...] = ()
    num_blocks: int = 0
    home: int = -1


@dataclass(slots=True, eq=False)
class Turn:
    """One request. What `control_plane.router` reads of a request, it has under the same names.

    Attributes:
        chain: Segments of its prompt; the last holds question and answer.
        num_tokens: Of the prompt.
        arrived_s: When the client sent it.
        ready_s: When it was at the control plane that serves it.
        num_hit_blocks: Found at its admission.
        num_queued_tokens: Of the prompt, without what was cached when it came to its replica.
        joins_at_step: Of its replica, the first one that was not ordered yet when it came.
    """

    session: Session
    chain: tuple[Segment, ...]
    num_prompt_blocks: int
    num_output_blocks: int
    arrived_s: float = 0.0
    ready_s: float = 0.0
    first_token_s: float = -1.0
    num_hit_blocks: int = 0
    num_queued_tokens: int = 0
    joins_at_step: int = 0
    control_plane: int = -1
    is_measured: bool = False
    avoid: str = field(default="", repr=False)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_blocks * BLOCK_SIZE

    @property
    def num_output_tokens(self) -> int:
        return self.num_output_blocks * BLOCK_SIZE + 1

    @property
    def max_total_tokens(self) -> int:
        return self.num_tokens + self.num_output_tokens

    @property
    def live_sequences(self) -> tuple[Turn, ...]:
        return (self,)


def _find(cumulative: list[float], draw: float) -> int:
    # Sums of floats may end just below 1.
    return min(bisect_left(cumulative, draw), len(cumulative) - 1)


class Workload:
    """Draws sessions and their turns."""

    def __init__(self, config: WorkloadConfig) -> None:
        self.config = config
        self._rng = np.random.default_rng(config.seed)
        self._pools: dict[str, tuple[list[tuple[Segment, int]], list[float]]] = {}
        for name, size in (
            ("system", config.num_system_prompts),
            ("agent", config.num_agent_prefixes),
        ):
            low, high = _POOL_BLOCKS[name]
            prefixes = [
                (Segment(int(blocks)), int(key))
                for blocks, key in zip(
                    self._rng.integers(low, high + 1, size),
                    self._rng.integers(0, 1 << 63, size),
                    strict=True,
                )
            ]
            weights = np.arange(1, size + 1, dtype=np.float64) ** -config.zipf_exponent
            self._pools[name] = prefixes, np.cumsum(weights / weights.sum()).tolist()
        # The hot prefix has the mean length of a system prompt.
        self._hot = Segment(sum(_POOL_BLOCKS["system"]) // 2), int(self._rng.integers(0, 1 << 63))
        sessions = np.array([kind.share / kind.mean_turns for kind in KINDS])
        self._kinds: list[float] = np.cumsum(sessions / sessions.sum()).tolist()
        self._uniform: list[float] = []

    def new_session(self) -> Session:
        """The next session to arrive."""
        kind = KINDS[_find(self._kinds, self._draw())]
        own_key = int(self._draw() * (1 << 63))
        if self._draw() < self.config.hot_share:
            root, key = self._hot
        elif kind.pool:
            prefixes, popularity = self._pools[kind.pool]
            root, key = prefixes[_find(popularity, self._draw())]
        else:
            root, key = None, own_key
        turns = 1
        while kind.mean_turns > 1 and self._draw() > 1 / kind.mean_turns:
            turns += 1
        session = Session(kind, key, own_key, turns)
        if root is not None:
            session.chain = (root,)
            session.num_blocks = root.num_blocks
        return session

    def next_turn(self, session: Session) -> Turn:
        """The session's next question."""
        question = self._between(*session.kind.question)
        answer = self._between(*session.kind.answer)
        num_prompt_blocks = session.num_blocks + question
        chain = (*session.chain, Segment(question + answer))
        session.chain, session.num_blocks = chain, num_prompt_blocks + answer
        session.turns_left -= 1
        if session.num_blocks > _MAX_PROMPT_BLOCKS:
            session.turns_left = 0
        return Turn(session, chain, num_prompt_blocks, answer)

    def think_s(self, session: Session) -> float:
        """Seconds until the session's next question."""
        return -session.kind.think_s * math.log1p(-self._draw())

    def interarrival_s(self, rate: float) -> float:
        """Seconds to the next of arrivals at `rate` per second."""
        return -math.log1p(-self._draw()) / rate

    def pick(self, size: int) -> int:
        """One of `size`, each as likely."""
        return int(self._draw() * size)

    def _between(self, low: int, high: int) -> int:
        return low + int(self._draw() * (high - low + 1))

    def _draw(self) -> float:
        if not self._uniform:
            self._uniform = self._rng.random(1 << 14).tolist()
        return self._uniform.pop()


def sessions_per_s(device: Device, *, load: float, num_replicas: int) -> float:
    """Arrivals that use the share `load` of what the replicas could do with perfect caches.

    A replica is at its limit when all rows are taken. With u new tokens and o output tokens per
    request, a step takes fixed + rows * per_row + prefill, so that limit is
    rows / (o * fixed + rows * (u * per_token + o * per_row)) requests per second. Perfect: only
    questions are computed, never a shared prefix or a history.
    """
    new_tokens = sum(k.share * (sum(k.question) / 2) * BLOCK_SIZE for k in KINDS)
    output_tokens = sum(k.share * (sum(k.answer) / 2 * BLOCK_SIZE + 1) for k in KINDS)
    rows = device.max_num_seqs
    per_request_s = (
        output_tokens * device.fixed_s / rows
        + new_tokens * device.per_token_s
        + output_tokens * device.per_row_s
    )
    turns = 1 / sum(kind.share / kind.mean_turns for kind in KINDS)
    return load * num_replicas / per_request_s / turns
