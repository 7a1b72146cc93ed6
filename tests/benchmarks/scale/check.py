"""The simulation against the real thing: one control plane and a few simulated workers.

Same workload, same model of a device, one control plane: the real process with real streams on one
side, `Simulation` on the other. Everything happens `slower` times slower than on the device, so
that what this machine adds to a step hardly counts.

Owns: driving the real system with the simulated workload. Does not know how either works.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from demo.model import ensure_demo_model
from demo.stack import ServingStack, StackConfig
from tests.benchmarks.scale.simulation import Setup, Simulation
from tests.benchmarks.scale.workload import BLOCK_SIZE, sessions_per_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from pagewire_client import AsyncClient

    from tests.benchmarks.scale.prefix_cache import Segment
    from tests.benchmarks.scale.workload import Session

_ROOT = Path(__file__).resolve().parents[3]
_TOKENS = (100, 40_000)


class _Driver:
    """Sends the sessions of a workload to a real server, in real time."""

    def __init__(self, setup: Setup, client: AsyncClient, slower: float) -> None:
        # The same numbers of prompts and the same shares as in the simulation.
        self._workload = Simulation(setup).workload
        self._setup = setup
        self._client = client
        self._slower = slower
        self._rng = np.random.default_rng(setup.seed)
        self._roots: dict[Segment, NDArray[np.int64]] = {}
        self._warm = setup.warm_up * setup.num_replicas
        self._last = self._warm + setup.measured * setup.num_replicas
        self._began: dict[str, float] | None = None
        self._ended: dict[str, float] | None = None
        self.num_sent = 0
        self.num_wrong = 0
        self.ttft_s: list[float] = []

    async def run(self, say: Callable[[float], None]) -> None:
        """Until everything that is measured has its answer."""
        rate = sessions_per_s(
            self._setup.device, load=self._setup.load, num_replicas=self._setup.num_replicas
        )
        next_s = time.perf_counter()
        async with asyncio.TaskGroup() as sessions:
            while self.num_sent < self._last:
                sessions.create_task(self._session(self._workload.new_session()))
                next_s += self._workload.interarrival_s(rate) * self._slower
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
                say(self.num_sent / self._last)

    async def hit_rate(self) -> float:
        """Of what was admitted from the warm-up's end to the last request."""
        assert self._began is not None
        assert self._ended is not None
        change = {name: self._ended[name] - self._began[name] for name in self._began}
        return change["hits"] / change["queries"]

    async def _counters(self) -> dict[str, float]:
        replicas = (await self._client.stats()).replicas
        return {
            "hits": sum(r.prefix_hits for r in replicas),
            "queries": sum(r.prefix_queries for r in replicas),
        }

    def _random(self, size: int) -> NDArray[np.int64]:
        return self._rng.integers(*_TOKENS, size)

    async def _session(self, session: Session) -> None:
        tokens: list[int] = []
        for root in session.chain:
            if root not in self._roots:
                self._roots[root] = self._random(root.num_blocks * BLOCK_SIZE)
            tokens = self._roots[root].tolist()
        while self.num_sent < self._last:
            turn = self._workload.next_turn(session)
            # An answer's last token opens the next question: prompts stay whole blocks.
            tokens += self._random(turn.num_tokens - len(tokens)).tolist()
            self.num_sent += 1
            number = self.num_sent
            if number == self._warm:
                self._began = await self._counters()
            tokens += await self._ask(tokens, turn.num_output_tokens, number >= self._warm)
            if number == self._last:
                self._ended = await self._counters()
            if not session.turns_left:
                return
            await asyncio.sleep(self._workload.think_s(session) * self._slower)

    async def _ask(self, prompt: list[int], num_output_tokens: int, is_measured: bool) -> list[int]:
        sent_s, answer = time.perf_counter(), list[int]()
        async with self._client.generate(
            prompt, max_tokens=num_output_tokens, ignore_eos=True, timeout_s=600.0
        ) as generation:
            async for chunk in generation:
                if not answer and chunk.token_ids and is_measured:
                    self.ttft_s.append((time.perf_counter() - sent_s) / self._slower)
                answer += chunk.token_ids
        self.num_wrong += len(answer) != num_output_tokens
        return answer


def _long_model(model_dir: Path, target: Path) -> Path:
    """The same model, said to take longer prompts: nothing computes with it."""
    target.mkdir()
    for file in model_dir.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 16_384
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def _profile(setup: Setup, slower: float, path: Path) -> Path:
    device = setup.device
    path.write_text(
        json.dumps(
            {
                "step_us": device.fixed_s * slower * 1e6,
                "row_us": device.per_row_s * slower * 1e6,
                "prefill_token_us": device.per_token_s * slower * 1e6,
                "num_blocks": device.num_blocks,
                "max_num_seqs": device.max_num_seqs,
                "max_num_batched_tokens": device.max_num_batched_tokens,
            }
        ),
        encoding="utf-8",
    )
    return path


async def compare(
    setup: Setup, *, slower: float, say: Callable[[str], None], progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Run both; gives hit rate and times to the first token of each."""
    outcome = await asyncio.to_thread(Simulation(setup).run)
    rows: list[dict[str, Any]] = [
        {
            "what": "simulated",
            "hit_rate": outcome.hit_rate,
            "ttft_p50_ms": outcome.ttft_ms[0],
            "ttft_p99_ms": outcome.ttft_ms[1],
        }
    ]
    model_dir = await asyncio.to_thread(
        ensure_demo_model, _ROOT / ".pagewire" / "models", progress=say
    )
    with tempfile.TemporaryDirectory(prefix="pagewire-scale-") as temporary:
        base_dir = Path(temporary)
        config = StackConfig(
            root=_ROOT,
            base_dir=base_dir,
            model_dir=_long_model(model_dir, base_dir / "model"),
            model_name="scale",
            python=sys.executable,
            environment=os.environ,
            store="memory://",
            random_ports=True,
            worker_args=(
                *("--simulate", str(_profile(setup, slower, base_dir / "profile.json"))),
                *("--simulate-workers", str(setup.num_replicas), "--max-model-len", "16384"),
            ),
        )
        async with ServingStack(config) as stack:
            stack.start_control_plane("--lookahead", str(setup.device.lookahead))
            stack.start_worker("sim")
            await stack.wait_until_ready(setup.num_replicas)
            async with stack.client() as client:
                driver = _Driver(setup, client, slower)
                await stack.processes.guard(driver.run(progress))
                p50, p99 = np.percentile(driver.ttft_s, (50, 99)) * 1e3
                rows.append(
                    {
                        "what": "real",
                        "hit_rate": await driver.hit_rate(),
                        "ttft_p50_ms": float(p50),
                        "ttft_p99_ms": float(p99),
                        "sent": driver.num_sent,
                        "wrong": driver.num_wrong,
                    }
                )
    return rows
