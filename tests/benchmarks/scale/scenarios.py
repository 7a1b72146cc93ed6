"""Which runs make which table.

Owns: the setups and how their rows read. Does not know: how a run works.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.benchmarks.scale.ring import Ring, hash64
from tests.benchmarks.scale.simulation import Outage, Setup, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.benchmarks.scale.outcome import Outcome

REPLICAS = (10, 50, 200, 1000)
PLANES = (4, 16, 64)
LOADS = (0.5, 0.7, 0.9)
# How a request finds its control plane: label -> placement and key.
POLICIES = {
    "random": ("random", "prefix"),
    "connection": ("connection", "prefix"),
    "hash": ("hash", "prefix"),
    "hash, sticky": ("hash", "sticky"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A setup and how its row is called."""

    label: str
    setup: Setup


def setup(num_replicas: int, num_planes: int = 1, policy: str = "hash", **more: Any) -> Setup:
    """A setup by the name of its policy; small fleets run longer, large ones shorter."""
    placement, key = POLICIES[policy]
    warm_up, measured = (
        (400, 600) if num_replicas <= 10 else (200, 120) if num_replicas <= 200 else (150, 50)
    )
    made = Setup(
        num_replicas=num_replicas,
        num_control_planes=num_planes,
        placement=placement,
        key=key,
        warm_up=warm_up,
        measured=measured,
    )
    return replace(made, **more)


def size_runs(replicas: tuple[int, ...]) -> Iterator[Run]:
    """Every policy at every size, 70 % load. One control plane that knows all is the oracle."""
    for num_replicas in replicas:
        yield Run(f"{num_replicas:>5} x 1   oracle", setup(num_replicas))
        for num_planes in PLANES:
            # Larger control planes than 64 replicas take long to simulate and are like the oracle.
            if num_planes <= num_replicas <= 64 * num_planes:
                for policy in POLICIES:
                    label = f"{num_replicas:>5} x {num_planes:<3} {policy}"
                    yield Run(label, setup(num_replicas, num_planes, policy))


def load_runs(num_replicas: int, num_planes: int) -> Iterator[Run]:
    """Every policy at every load."""
    for load in LOADS:
        yield Run(f"{load:.0%} oracle", setup(num_replicas, load=load))
        for policy in POLICIES:
            yield Run(f"{load:.0%} {policy}", setup(num_replicas, num_planes, policy, load=load))


def key_runs(num_replicas: int, num_planes: int) -> Iterator[Run]:
    """What is hashed."""
    for key in ("prefix", "session", "sticky", "template"):
        yield Run(f"key: {key}", setup(num_replicas, num_planes, "hash", key=key))


def cost_runs(num_replicas: int, num_planes: int) -> Iterator[Run]:
    """What replicas tell the router of their queue."""
    for planes in (1, num_planes):
        for cost in ("today", "uncached", "rows"):
            yield Run(
                f"{planes:>3} planes, queue: {cost}",
                setup(num_replicas, planes, "hash, sticky", cost=cost),
            )


def hot_runs(num_replicas: int, num_planes: int) -> Iterator[Run]:
    """One prefix starts 30 % of all sessions."""
    yield Run("oracle", setup(num_replicas, hot_share=0.3))
    yield Run("random", setup(num_replicas, num_planes, "random", hot_share=0.3))
    for spill in (1.1, 1.25, 2.0, math.inf):
        name = "no spill" if spill == math.inf else f"spill at {spill}"
        yield Run(
            f"hash, {name}", setup(num_replicas, num_planes, "hash", hot_share=0.3, spill=spill)
        )
    yield Run(
        "hash, sticky, spill at 1.25",
        setup(num_replicas, num_planes, "hash, sticky", hot_share=0.3),
    )


def outage_runs(num_replicas: int, num_planes: int) -> Iterator[Run]:
    """Control plane 0 goes at 3 s, or comes at 3 s."""
    never = math.inf
    for label, outage in (
        ("restart in 5 s, warm", Outage(control_plane=0, from_s=3, to_s=8)),
        ("restart in 5 s, cold", Outage(control_plane=0, from_s=3, to_s=8, keeps_cache=False)),
        ("gone for good", Outage(control_plane=0, from_s=3, to_s=never)),
        ("joins, cold", Outage(control_plane=0, from_s=-1, to_s=3, keeps_cache=False)),
    ):
        for policy in ("hash", "connection"):
            yield Run(
                f"{label}; {policy}",
                setup(num_replicas, num_planes, policy, measured=200, outages=(outage,)),
            )


def moved_keys(num_planes: int, num_keys: int = 100_000) -> dict[str, float]:
    """Share of keys with another owner once a control plane went, or came."""
    ring = Ring()
    for member in range(num_planes):
        ring.add(member)
    keys = [hash64(i.to_bytes(8, "big")) for i in range(num_keys)]
    before = [ring.owner(key) for key in keys]
    shares = [before.count(member) / num_keys * num_planes for member in range(num_planes)]
    ring.remove(0)
    dies = sum(ring.owner(key) != was for key, was in zip(keys, before, strict=True))
    ring.add(0)
    ring.add(num_planes)
    joins = sum(ring.owner(key) != was for key, was in zip(keys, before, strict=True))
    return {
        "planes": num_planes,
        "moved_when_one_dies": dies / num_keys,
        "moved_when_one_joins": joins / num_keys,
        "largest_share": max(shares),
    }


def perform(run: Run, progress: Callable[[float], None] | None = None) -> dict[str, Any]:
    """Run it; gives label, setup, figures, and the hit rate of every simulated second."""
    simulation = Simulation(run.setup)
    outcome = simulation.run(progress)
    seconds = sorted(simulation.hits_by_second.items())
    return {
        "label": run.label,
        "setup": asdict(run.setup),
        "outcome": asdict(outcome),
        "hit_rate_by_second": [hits / max(prompts, 1) for _, (hits, prompts) in seconds],
    }


HEADER = (
    f"{'':<26} {'hit':>5} {'of':>5} {'TTFT ms p50':>11} {'p99':>6} {'queue p99':>9} "
    f"{'busiest replica':>15} {'plane':>6} {'rows':>5} {'forw.':>6} {'spill':>6}"
)
RATES_HEADER = (
    f"{'':<26} {'requests/s':>10} {'plane':>7} {'steps/s':>8} {'plane':>7} {'tokens/s':>9} "
    f"{'plane':>8} {'index changes/s':>15} {'plane':>7}"
)


def quality_row(label: str, o: Outcome) -> str:
    """One line under HEADER."""
    end = "  overloaded" if o.is_overloaded else ""
    return (
        f"{label:<26} {o.hit_rate:5.1%} {o.reusable:5.1%} {o.ttft_ms[0]:11.0f} "
        f"{o.ttft_ms[1]:6.0f} {o.queue_ms[1]:9.0f} {o.replica_balance:15.2f} "
        f"{o.plane_balance:6.2f} {o.rows:5.0f} {o.forwarded:6.0%} {o.spilled:6.0%}{end}"
    )


def rates_row(label: str, o: Outcome) -> str:
    """One line under RATES_HEADER; the second of two figures is the busiest control plane's."""
    return (
        f"{label:<26} {o.requests_per_s:10.0f} {o.requests_per_s_max:7.0f} {o.steps_per_s:8.0f} "
        f"{o.steps_per_s_max:7.0f} {o.output_per_s:9.0f} {o.output_per_s_max:8.0f} "
        f"{o.changes_per_s:15.0f} {o.changes_per_s_max:7.0f}"
    )
