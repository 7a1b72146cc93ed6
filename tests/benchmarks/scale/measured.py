"""What the real structures cost here: the prefix index, the prefix store, the choice of a replica.

Unlike everything else in this package these are measurements of the running machine, on the code
that serves: `BlockPool`, `RedisPrefixStore` with a Valkey server of its own, `router.choose` over
real schedulers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import redis.asyncio

from control_plane import router
from control_plane.block_hash import BlockHasher
from control_plane.block_pool import BlockPool
from control_plane.kv_cache_manager import KVCacheConfig, KVCacheManager
from control_plane.prefix_store import PrefixScope, StoreTiming, open_prefix_store
from control_plane.request import Request, SamplingParams
from control_plane.scheduler import Scheduler
from control_plane.scheduler_config import SchedulerConfig
from demo import valkey
from demo.ports import any_free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from control_plane.request import BlockHash, BlockId, Version

BLOCK_SIZE = 16
_OUTPUT_TOKENS = 256
_ROOM = _OUTPUT_TOKENS // BLOCK_SIZE + 2  # blocks beyond a prompt's, or it would not fit
_ROOT = Path(__file__).resolve().parents[3]


def _hashes(count: int, start: int = 0) -> list[BlockHash]:
    return [
        cast("BlockHash", sha256(i.to_bytes(8, "little")).digest())
        for i in range(start, start + count)
    ]


# Memory of the index.


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fill_index(num_blocks: int) -> dict[str, float]:
    """Resident bytes per block of an empty and of a full pool; in a process of its own, please."""
    before = _resident_bytes()
    pool = BlockPool(num_blocks + 1)
    empty = _resident_bytes()
    for start in range(0, num_blocks, 4096):
        size = min(4096, num_blocks - start)
        block_ids = pool.allocate(size, version=start + 1)
        pool.register(block_ids, _hashes(size, start), version=None)
        pool.release(reversed(block_ids))
        pool.take_changes()
    full = _resident_bytes()
    return {
        "num_blocks": num_blocks,
        "empty_bytes_per_block": (empty - before) / num_blocks,
        "full_bytes_per_block": (full - before) / num_blocks,
    }


def measure_index(num_blocks: int) -> dict[str, float]:
    """`fill_index` in a fresh interpreter, whose memory nobody else has grown."""
    code = (
        "import json; from tests.benchmarks.scale.measured import fill_index; "
        f"print(json.dumps(fill_index({num_blocks})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout)


# The prefix store.


async def _write(url: str, num_scopes: int, num_blocks: int, rounds: int) -> dict[str, float]:
    store = open_prefix_store(url, deployment="scale")
    client = redis.asyncio.from_url(url)
    await store.start()
    scopes = [PrefixScope("scale", bytes(32), bytes([i]) * 32) for i in range(num_scopes)]
    before = (await client.info("memory"))["used_memory"]
    used, wall_s, cpu_s, server_s = 0, 0.0, 0.0, 0.0
    for turn in range(rounds):
        batches: list[dict[BlockId, tuple[BlockHash, Version] | None]] = []
        for i in range(num_scopes):
            hashes = _hashes(num_blocks, (turn * num_scopes + i) * num_blocks)
            batches.append(
                cast(
                    "dict[BlockId, tuple[BlockHash, Version] | None]",
                    {at + 1: (name, turn + 1) for at, name in enumerate(hashes)},
                )
            )
        server = await client.info("cpu")
        began, cpu_began = time.perf_counter(), time.process_time()
        for scope, batch in zip(scopes, batches, strict=True):
            store.record(scope, batch)
        async with asyncio.timeout(300):
            while cast("Any", store).num_pending:  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.01)
        wall_s += time.perf_counter() - began
        cpu_s += time.process_time() - cpu_began
        after = await client.info("cpu")
        server_s += sum(after[key] - server[key] for key in ("used_cpu_user", "used_cpu_sys"))
        used = (await client.info("memory"))["used_memory"] - before
    num_entries = num_scopes * num_blocks
    await store.close()
    await client.aclose()
    return {
        "num_entries": num_entries,
        "bytes_per_entry": used / num_entries,
        "control_plane_cpu_us_per_write": cpu_s / rounds / num_entries * 1e6,
        "server_cpu_us_per_write": server_s / rounds / num_entries * 1e6,
        "writes_per_s": rounds * num_entries / wall_s,
    }


async def _renew(url: str, num_replicas: int, rounds: int) -> dict[str, float]:
    """Leases of replicas that write nothing: what keeps their keys and their place in the set."""
    # As fast as they come, instead of every two seconds.
    timing = StoreTiming(renew_interval_s=1e-4, coalesce_s=1e-4, op_timeout_s=60.0)
    store = open_prefix_store(url, deployment="leases", timing=timing)
    client = redis.asyncio.from_url(url)
    await store.start()
    scopes = [
        PrefixScope("leases", bytes(32), i.to_bytes(32, "little")) for i in range(num_replicas)
    ]
    names = ("hget", "pexpire", "sismember")

    async def calls() -> dict[str, int]:
        stats = await client.info("commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names}

    async def renew(turns: int) -> int:
        """Gives how many renewals the server saw."""
        before = (await calls())["sismember"]
        seen = 0
        async with asyncio.timeout(300):
            for turn in range(1, turns + 1):
                for scope in scopes:
                    store.renew(scope, dict)
                while seen < turn * num_replicas:
                    await asyncio.sleep(0.01)
                    seen = (await calls())["sismember"] - before
        return seen

    await renew(1)  # the first one also writes and lists them
    before, server = await calls(), await client.info("cpu")
    cpu_began = time.process_time()
    num_renewals = await renew(rounds)
    cpu_s = time.process_time() - cpu_began
    after, server_after = await calls(), await client.info("cpu")
    server_s = sum(server_after[key] - server[key] for key in ("used_cpu_user", "used_cpu_sys"))
    set_bytes = await client.memory_usage("pagewire:1:scopes:leases:0", samples=0)
    await store.close()
    await client.aclose()
    return {
        "commands_per_lease": sum(after[name] - before[name] for name in names) / num_renewals,
        "control_plane_cpu_us_per_lease": cpu_s / num_renewals * 1e6,
        "server_cpu_us_per_lease": server_s / num_renewals * 1e6,
        "set_bytes_per_replica": set_bytes / num_replicas,
    }


def measure_store(
    *, num_scopes: int = 4, num_blocks: int = 50_000, num_replicas: int = 200
) -> dict[str, float]:
    """Bytes in a real server, and what writing an entry and renewing a replica cost both sides."""

    async def run(port: int) -> dict[str, float]:
        await valkey.wait_until_answering(port)
        url = f"redis://127.0.0.1:{port}/0"
        written = await _write(url, num_scopes, num_blocks, 2)
        return {**written, **await _renew(url, num_replicas, 20)}

    port = any_free_port()
    with tempfile.TemporaryDirectory(prefix="pagewire-scale-") as base_dir:
        command = valkey.server_command(
            port=port, data_dir=Path(base_dir), options={"maxmemory": "0"}
        )
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                return asyncio.run(run(port))
            finally:
                server.terminate()


# The choice.


class Candidate:
    """An engine as far as the router sees it, over a real scheduler."""

    def __init__(self, index: int, hasher: BlockHasher, num_blocks: int) -> None:
        self.replica_id = f"replica-{index:04d}"
        self.is_doubtful = False
        self.queued_tokens = 0
        self.num_live = 0
        manager = KVCacheManager(
            KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
            hasher,
            max_num_seqs=8,
            max_model_len=16_384,
        )
        self.pool = manager.pool
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8192, max_model_len=16_384)
        self._scheduler = Scheduler(config, manager)
        self.fits = self._scheduler.fits

    def num_hit_tokens(self, request: Request) -> int:
        return self._scheduler.count_cached_tokens(request)

    def cache(self, hashes: list[BlockHash]) -> None:
        """Make a prompt's blocks known, as after a request that ended."""
        block_ids = self.pool.allocate(len(hashes), 1)
        self.pool.register(block_ids, hashes, version=None)
        self.pool.release(reversed(block_ids))


def _request(num_tokens: int) -> Request:
    tokens = np.random.default_rng(num_tokens).integers(0, 100_000, num_tokens, dtype=np.int32)
    return Request(
        req_id="r",
        prompt_token_ids=tokens,
        sampling=SamplingParams(),
        seed=0,
        max_total_tokens=num_tokens + _OUTPUT_TOKENS,
        arrival=0,
    )


def request_and_candidate(num_tokens: int) -> tuple[Request, Candidate]:
    """A request and a replica that has its whole prompt."""
    hasher = BlockHasher(deployment_seed=b"", model_fingerprint=bytes(32), block_size=BLOCK_SIZE)
    request = _request(num_tokens)
    hashes = hasher.extend(request.sequences[0], num_tokens)
    candidate = Candidate(0, hasher, len(hashes) + _ROOM)
    candidate.cache(hashes)
    return request, candidate


def measure_router(
    replicas: tuple[int, ...] = (1, 10, 50, 200), prompts: tuple[int, ...] = (512, 2048, 8192)
) -> Iterator[dict[str, float]]:
    """CPU microseconds per request to hash its prompt and to choose among replicas."""
    hasher = BlockHasher(deployment_seed=b"", model_fingerprint=bytes(32), block_size=BLOCK_SIZE)
    for num_tokens in prompts:
        request = _request(num_tokens)
        sequence = request.sequences[0]
        hash_us = _cpu_us(lambda s=sequence: _hash_anew(hasher, s))
        hashes = hasher.extend(sequence, num_tokens)
        for num_replicas in replicas:
            engines = [Candidate(i, hasher, len(hashes) + _ROOM) for i in range(num_replicas)]

            def choose(engines: list[Candidate] = engines, request: Request = request) -> None:
                router.choose(request, engines)

            row: dict[str, float] = {
                "prompt_tokens": num_tokens,
                "replicas": num_replicas,
                "hash_us": hash_us,
                "cached_nowhere_us": _cpu_us(choose),
            }
            for engine in engines:
                engine.cache(hashes)
            yield row | {"cached_everywhere_us": _cpu_us(choose)}


def _hash_anew(hasher: BlockHasher, sequence: Any) -> None:
    sequence.block_hashes.clear()
    hasher.extend(sequence, sequence.num_tokens)


def _cpu_us(call: Any, budget_s: float = 0.15) -> float:
    """Microseconds of CPU per call: the median of short rounds, as others use the machine."""
    rounds: list[float] = []
    until_s = time.process_time() + budget_s
    while len(rounds) < 5 or time.process_time() < until_s:
        began = time.process_time()
        count = 0
        while time.process_time() - began < budget_s / 20:
            call()
            count += 1
        rounds.append((time.process_time() - began) / count * 1e6)
    return float(np.median(rounds))
