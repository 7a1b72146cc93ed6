"""Eight questions, asked at once through the Python client, with the times of every token.

Owns: the prompts, what is measured of a stream, the comparison with transformers.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire_client import AsyncClient, Usage

    from demo.session import Session
    from demo.stack import ServingStack

MAX_TOKENS = 64
PROMPTS = (
    "Tell me about tea.",
    "Why is the sky blue?",
    "Name three colours and say what they remind you of.",
    "Write a short poem about rain.",
    "How do birds fly?",
    "Explain gravity to a child.",
    "Describe a walk through a forest in autumn.",
    "Give me a simple recipe for pancakes.",
)


@dataclass(slots=True)
class StreamRecord:
    """What one stream brought, and when.

    Attributes:
        token_ids: In order, as they came.
        times_s: Monotonic time of each of them.
        usage: Once it has ended.
    """

    token_ids: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])
    usage: Usage | None = None

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


class Workload:
    """All prompts as concurrent greedy streams that ignore end-of-sequence tokens."""

    def __init__(self, client: AsyncClient, *, cache_salt: str = "") -> None:
        self._client = client
        self._cache_salt = cache_salt
        self._news = asyncio.Event()
        self.records = [StreamRecord() for _ in PROMPTS]

    async def run(self) -> None:
        """Stream all of them to their end.

        Raises:
            PagewireError: one failed; the others are cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            for prompt, record in zip(PROMPTS, self.records, strict=True):
                tasks.create_task(self._stream(prompt, record))

    async def wait_for_tokens(self, count: int) -> None:
        """Wait until every stream has that many."""
        while min(len(record.token_ids) for record in self.records) < count:
            self._news.clear()
            await self._news.wait()

    async def _stream(self, prompt: str, record: StreamRecord) -> None:
        generation = self._client.chat(
            [{"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            cache_salt=self._cache_salt,
        )
        async with generation:
            async for chunk in generation:
                record.token_ids += chunk.token_ids
                record.times_s += [time.monotonic()] * len(chunk.token_ids)
                self._news.set()
        record.usage = generation.log.completion().usage


async def reference(session: Session, stack: ServingStack) -> list[list[int]]:
    """Give what transformers generates for the prompts, computed now."""
    run_dir = session.settings.base_dir / "run"
    task_path, answer_path = run_dir / "reference-in.json", run_dir / "reference-out.json"
    task = {"prompts": list(PROMPTS), "max_tokens": MAX_TOKENS}
    task_path.write_text(json.dumps(task), encoding="utf-8")
    started_s = session.console.elapsed_s
    log_path = stack.config.base_dir / "logs" / "transformers.log"
    try:
        async with session.console.busy(lambda: _last_line(log_path, "transformers")):
            await stack.processes.run(
                "transformers",
                [
                    *(sys.executable, "-m", "demo.reference"),
                    *(str(stack.config.model_dir), str(task_path), str(answer_path)),
                ],
            )
        answers = json.loads(answer_path.read_text(encoding="utf-8"))
    finally:
        task_path.unlink(missing_ok=True)
        answer_path.unlink(missing_ok=True)
    session.console.say(
        "transformers",
        f"{len(PROMPTS)} prompts, {MAX_TOKENS} tokens each, greedy, fp32, "
        f"{session.console.elapsed_s - started_s:.1f} s",
    )
    return [answer["token_ids"] for answer in answers]


def _last_line(path: Path, default: str) -> str:
    try:
        lines = [
            line
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("transformers:")
        ]
    except OSError:
        return default
    return lines[-1] if lines else default


def report_differences(records: list[StreamRecord], expected: list[list[int]]) -> list[str]:
    """Say where streams differ from what is expected; empty if nowhere."""
    differences: list[str] = []
    for prompt, record, ids in zip(PROMPTS, records, expected, strict=True):
        if record.token_ids == ids:
            continue
        pairs = zip(record.token_ids, ids, strict=False)
        at = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
        where = (
            f"{len(record.token_ids)} tokens instead of {len(ids)}"
            if at is None
            else f"token {at} is {record.token_ids[at]} instead of {ids[at]}"
        )
        differences.append(f"{prompt!r}: {where}")
    return differences
