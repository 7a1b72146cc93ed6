"""A replica as its control plane and its clients see it: rows, blocks, time per step.

Steps that differ in nothing are one event: a replica whose rows only decode is next looked at when
the first of them ends, or when a request comes. The result is the same as step by step.

Owns: continuous batching of one replica in simulated time. Does not know: other replicas, where
requests come from.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tests.benchmarks.scale.prefix_cache import PrefixCache
from tests.benchmarks.scale.workload import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.benchmarks.scale.workload import Turn


# What a replica says of its queue: "today" is what the engine reports, the tokens of all prompts
# without a first token, cached or not; "uncached" leaves out what was cached when they came; "rows"
# adds, for every live request, what its rows cost others in prefill tokens: 150 more steps of
# per_row / per_token.
COSTS = ("today", "uncached", "rows")
ROW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a step takes: fixed + rows * per_row + prefill tokens * per_token, in seconds.

    The defaults are lines through the H200 figures of the 8B shape in docs/performance.md: decode
    steps of 1 to 256 rows at a context of 1 024 (4.48 to 16.11 ms), first tokens of 128 to 8 192
    tokens (7.24 to 222.7 ms).

    Attributes:
        num_blocks: KV cache; the default is about a quarter of what that GPU holds.
        max_num_seqs: Rows.
        max_num_batched_tokens: Per step.
        lookahead: Steps ordered beyond the one whose result is awaited.
    """

    fixed_s: float = 4.7e-3
    per_row_s: float = 0.044e-3
    per_token_s: float = 0.024e-3
    num_blocks: int = 12_288
    max_num_seqs: int = 96
    max_num_batched_tokens: int = 8192
    lookahead: int = 2


class Replica:
    """One copy of the model. Also a `control_plane.router.Candidate`.

    Attributes:
        replica_id: Sorts as its number does.
        queued_whole_tokens: Prompts without a first token.
        queued_uncached_tokens: The same without what was cached when they came.
        num_live: Requests here.
        num_steps: Since the start; so are the next two.
        num_row_steps: Rows decoded.
        num_prefill_tokens: Tokens prefilled.
    """

    __slots__ = (
        "_chunks",
        "_cost",
        "_decoding",
        "_finishes",
        "_prefilling",
        "_report",
        "_run_ends_s",
        "_run_started_s",
        "_run_steps",
        "_schedule",
        "_serial",
        "_step",
        "_unit_s",
        "_waiting",
        "cache",
        "device",
        "index",
        "num_live",
        "num_prefill_tokens",
        "num_row_steps",
        "num_steps",
        "queued_uncached_tokens",
        "queued_whole_tokens",
        "replica_id",
    )

    def __init__(
        self,
        index: int,
        device: Device,
        schedule: Callable[[float, Replica], None],
        report: Callable[[float, Replica, Turn, str], None],
        cost: str = "today",
    ) -> None:
        """Build an idle one.

        Args:
            index: Its number.
            device: What it runs on.
            schedule: Called with the time at which `wake` is due; a later call replaces it.
            report: Called when a turn was "admitted", has its "first" token, or is "done".
            cost: What the router is told of the queue, one of COSTS.
        """
        self.index = index
        self.replica_id = f"{index:06d}"
        self.cache = PrefixCache(index, device.num_blocks)
        self.queued_whole_tokens = 0
        self.queued_uncached_tokens = 0
        self.num_live = 0
        self.num_steps = 0
        self.num_row_steps = 0
        self.num_prefill_tokens = 0
        self._cost = cost
        self.device = device
        self._schedule = schedule
        self._report = report
        self._waiting: deque[Turn] = deque()
        self._prefilling: deque[list[Turn | int]] = deque()
        self._decoding: dict[Turn, int] = {}  # turn -> step at which it ends
        self._finishes: list[tuple[int, int, Turn]] = []
        self._serial = 0
        self._step = 0  # decode steps so far: rows end at a step, whatever steps take
        self._run_steps = 0
        self._run_started_s = 0.0
        self._run_ends_s = 0.0
        self._unit_s = 0.0
        self._chunks: list[tuple[Turn, int]] = []

    # What the router asks.

    @property
    def is_doubtful(self) -> bool:
        return False

    @property
    def queued_tokens(self) -> int:
        if self._cost == "today":
            return self.queued_whole_tokens
        if self._cost == "uncached":
            return self.queued_uncached_tokens
        return self.queued_uncached_tokens + ROW_TOKENS * self.num_live

    def fits(self, num_total_tokens: int, num_sequences: int) -> bool:
        return num_sequences == 1 and num_total_tokens <= self.device.num_blocks * BLOCK_SIZE

    def num_hit_tokens(self, request: Turn) -> int:
        return self.cache.count_hits(request.chain, request.num_prompt_blocks) * BLOCK_SIZE

    # What happens to it.

    def add(self, turn: Turn, now: float) -> None:
        """Let a request wait for a row."""
        turn.num_queued_tokens = turn.num_tokens - self.num_hit_tokens(turn)
        self.queued_whole_tokens += turn.num_tokens
        self.queued_uncached_tokens += turn.num_queued_tokens
        self.num_live += 1
        self._waiting.append(turn)
        if not self._run_steps:
            turn.joins_at_step = self._step
            self._start_run(now)
            return
        # Plans for the steps of the lookahead are under way; it joins the one behind them.
        num_begun = min(int((now - self._run_started_s) / self._unit_s) + 1, self._run_steps)
        turn.joins_at_step = self._step + num_begun + self.device.lookahead
        if len(self._waiting) == 1 and self._has_free_row():
            num_steps = turn.joins_at_step - self._step
            if num_steps < self._run_steps:
                self._run_steps = num_steps
                self._run_ends_s = self._run_started_s + num_steps * self._unit_s
                self._schedule(self._run_ends_s, self)

    def wake(self, now: float) -> None:
        """The steps that were scheduled have run."""
        self._step += self._run_steps
        self.num_steps += self._run_steps
        self.num_row_steps += self._run_steps * len(self._decoding)
        self._run_steps = 0
        chunks, self._chunks = self._chunks, []
        for turn, num_left in chunks:
            if num_left == 0:
                self._begin_decoding(turn, now)
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._step:
            turn = heappop(finishes)[2]
            del self._decoding[turn]
            self._end(turn, turn.num_output_blocks)
            self._report(now, self, turn, "done")
        self._start_run(now)

    def evacuate(self) -> list[Turn]:
        """The control plane is gone: rows are dropped, the KV stays. Gives back what was live."""
        turns: list[Turn] = [*self._waiting]
        for turn in self._waiting:
            self.num_live -= 1
            self._unqueue(turn)
        for entry in self._prefilling:
            turn = entry[0]
            assert not isinstance(turn, int)
            self._unqueue(turn)
            self._end(turn, 0)
            turns.append(turn)
        for turn, num_left in self._chunks:
            if num_left == 0:  # its last chunk was being computed
                self._unqueue(turn)
                self._end(turn, 0)
                turns.append(turn)
        for turn, last in self._decoding.items():
            num_output = turn.num_output_tokens - 1 - max(last - self._step, 0)
            self._end(turn, min(num_output // BLOCK_SIZE, turn.num_output_blocks))
            turns.append(turn)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._finishes.clear()
        self._chunks.clear()
        self._run_steps = 0
        return turns

    def _has_free_row(self) -> bool:
        return len(self._decoding) + len(self._prefilling) < self.device.max_num_seqs

    def _begin_decoding(self, turn: Turn, now: float) -> None:
        self._unqueue(turn)
        self._report(now, self, turn, "first")
        last = self._step + turn.num_output_tokens - 1
        self._decoding[turn] = last
        self._serial += 1
        heappush(self._finishes, (last, self._serial, turn))

    def _unqueue(self, turn: Turn) -> None:
        self.queued_whole_tokens -= turn.num_tokens
        self.queued_uncached_tokens -= turn.num_queued_tokens

    def _end(self, turn: Turn, num_computed_blocks: int) -> None:
        self.num_live -= 1
        self.cache.release(turn.chain, turn.num_output_blocks, num_computed_blocks)

    def _start_run(self, now: float) -> None:
        """Admit who fits, then order what comes until something changes."""
        waiting, cache = self._waiting, self.cache
        while waiting and self._has_free_row():
            turn = waiting[0]
            if turn.joins_at_step > self._step and (self._decoding or self._prefilling):
                break
            num_hits = cache.admit(turn.chain, turn.num_prompt_blocks, turn.num_output_blocks)
            if num_hits is None:
                break
            waiting.popleft()
            turn.num_hit_blocks = num_hits
            self._prefilling.append([turn, turn.num_tokens - num_hits * BLOCK_SIZE])
            self._report(now, self, turn, "admitted")
        device = self.device
        unit_s = device.fixed_s + device.per_row_s * len(self._decoding)
        if self._prefilling:
            unit_s += device.per_token_s * self._order_chunks()
            self._run_steps = 1
        elif self._decoding:
            self._run_steps = self._finishes[0][0] - self._step
            if waiting and waiting[0].joins_at_step > self._step and self._has_free_row():
                self._run_steps = min(self._run_steps, waiting[0].joins_at_step - self._step)
        else:
            return
        self._unit_s, self._run_started_s = unit_s, now
        self._run_ends_s = now + self._run_steps * unit_s
        self._schedule(self._run_ends_s, self)

    def _order_chunks(self) -> int:
        """Give the step's budget to prefills in their order; gives the tokens of all."""
        budget = self.device.max_num_batched_tokens - len(self._decoding)
        num_tokens = 0
        while self._prefilling and budget > 0:
            entry = self._prefilling[0]
            turn, num_left = entry
            assert isinstance(num_left, int)
            assert not isinstance(turn, int)
            chunk = min(num_left, budget)
            budget -= chunk
            num_tokens += chunk
            entry[1] = num_left - chunk
            self._chunks.append((turn, num_left - chunk))
            if num_left == chunk:
                self._prefilling.popleft()
        self.num_prefill_tokens += num_tokens
        return num_tokens
