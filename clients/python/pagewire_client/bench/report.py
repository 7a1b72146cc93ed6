"""From records to numbers, and to a table for people.

Owns: definitions of the measures, which `DEFINITIONS` spells out in every result. Does not know:
how they were taken.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

from pagewire_client.bench.calls import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagewire_client.bench.config import BenchConfig
    from pagewire_client.bench.records import Outcome, RequestRecord

PERCENTILES = (50, 90, 99)
# A sender that needs more of a core than this per process measures itself.
BUSY_CLIENT = 0.85

DEFINITIONS = {
    "ttft": "from sending a request to the first message that brings a token",
    "itl": "between two messages of one request that bring tokens; with --flush-ms they bring "
    "several",
    "tpot": "of one request: (last token - first token) / (output tokens - 1)",
    "e2e": "from sending a request to the end of its call",
    "output_tok_s": "all output tokens / (last token of the run - its start, just before the "
    "first request)",
    "goodput": "requests that ended well and met every SLO given (TTFT; mean time between tokens)",
    "percentiles": "nearest rank, over requests that ended well; itl over all messages",
    "errors": f"by the server's reason; {UNFINISHED}: under way when the run ended; WRONG_LENGTH: "
    "not as many tokens as were asked for, end-of-sequence being ignored",
}


def summarize(
    config: BenchConfig, outcome: Outcome, *, server: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that a result file holds. Times in milliseconds, NaN as None."""
    good = [record for record in outcome.records if not record.reason]
    seconds = _busy_s(outcome)
    output_tokens = sum(record.output_tokens for record in outcome.records)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    results: dict[str, Any] = {
        "requests": {
            "sent": len(outcome.records),
            "good": len(good),
            "per_s": _ratio(len(good), seconds),
            "errors": dict(Counter(r.reason for r in outcome.records if r.reason)),
            "is_interrupted": outcome.is_interrupted,
        },
        "seconds": seconds,
        "tokens": {
            "prompt": prompt_tokens,
            "cached": sum(record.cached_tokens for record in good),
            "output": output_tokens,
            "messages": sum(record.num_messages for record in outcome.records),
        },
        "output_tok_s": _ratio(output_tokens, seconds),
        "total_tok_s": _ratio(output_tokens + prompt_tokens, seconds),
        "e2e_ms": spread(record.end_s - record.sent_s for record in good),
        "late_ms": spread(record.late_s for record in outcome.records),
        "client": _client(config, outcome),
    }
    if config.via == "stream":
        gaps = outcome.gaps
        results["ttft_ms"] = spread(r.first_s - r.sent_s for r in good if r.first_s is not None)
        results["itl_ms"] = {
            "mean": _ms(gaps.mean()),
            **{f"p{p}": _ms(gaps.percentile(p)) for p in PERCENTILES},
            "n": gaps.count,
        }
        results["tpot_ms"] = spread(value for r in good if (value := _tpot_s(r)) is not None)
        if config.slo_ttft_ms or config.slo_itl_ms:
            results["goodput"] = _goodput(config, good, len(outcome.records), seconds)
    if config.workload == "decode-rows":
        results["decode"] = decode_steps(outcome.records)
    return {
        "tool": "pagewire bench",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "parameters": config.to_json(),
        "server": server or {},
        "definitions": DEFINITIONS,
        "results": results,
    }


def versions() -> dict[str, str]:
    """Of what sends."""
    found = {"python": platform.python_version()}
    for name in ("pagewire", "grpcio", "protobuf"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def spread(values_s: Iterable[float]) -> dict[str, Any]:
    """Mean, percentiles, largest, in milliseconds, of seconds; None where there is nothing."""
    values = sorted(values_s)
    count = len(values)
    if not count:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}, "max": None, "n": 0}
    ranks = {p: values[max(1, math.ceil(count * p / 100)) - 1] for p in PERCENTILES}
    return {
        "mean": _ms(sum(values) / count),
        **{f"p{p}": _ms(value) for p, value in ranks.items()},
        "max": _ms(values[-1]),
        "n": count,
    }


def decode_steps(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """A decode step while all rows decode: between the last first token and the first last one.

    Tokens are counted in that window, so that messages of several tokens change nothing.
    """
    if not records or any(len(record.token_times) < 2 for record in records):
        return {"step_ms": None, "rows": len(records), "tokens": 0}
    start_s = max(record.token_times[0][0] for record in records)
    end_s = min(record.token_times[-1][0] for record in records)
    tokens = sum(
        count for record in records for at_s, count in record.token_times if start_s < at_s <= end_s
    )
    step_s = (end_s - start_s) * len(records) / tokens if tokens and end_s > start_s else math.nan
    return {"step_ms": _ms(step_s), "rows": len(records), "tokens": tokens}


def table(summary: dict[str, Any]) -> str:
    """The numbers for people."""
    parameters, results = summary["parameters"], summary["results"]
    requests, tokens, client = results["requests"], results["tokens"], results["client"]
    lines = [
        "",
        f"{parameters['workload']}, {_arrivals(parameters)}, via {parameters['via']}, "
        f"seed {parameters['seed']}",
        "",
        _row("requests", f"{requests['good']} of {requests['sent']}", f"{_n(requests['per_s'])}/s"),
        _row("seconds", _n(results["seconds"], 2)),
        _row("prompt tokens", str(tokens["prompt"]), f"{tokens['cached']} cached"),
        _row("output tokens", str(tokens["output"]), f"in {tokens['messages']} messages"),
        _row("output tokens/s", _n(results["output_tok_s"])),
        _row("total tokens/s", _n(results["total_tok_s"])),
        "",
        f"{'milliseconds':<18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name, label in (
        ("ttft_ms", "first token"),
        ("itl_ms", "between messages"),
        ("tpot_ms", "per output token"),
        ("e2e_ms", "whole request"),
    ):
        if name in results:
            lines.append(_spread_row(label, results[name]))
    if parameters["arrivals"] != "closed":
        lines.append(_spread_row("sent late by", results["late_ms"]))
    if "goodput" in results:
        good = results["goodput"]
        lines += ["", _row("within the SLO", f"{good['share']:.1%}", f"{_n(good['per_s'])}/s")]
    if "decode" in results:
        decode = results["decode"]
        lines += [
            "",
            _row("decode step", f"{_n(decode['step_ms'], 3)} ms", f"{decode['rows']} rows"),
        ]
    if requests["errors"]:
        lines += ["", "errors"]
        lines += [
            _row(f"  {reason}", str(count)) for reason, count in sorted(requests["errors"].items())
        ]
    lines += ["", _row("client", *_client_cells(client))]
    if requests["is_interrupted"]:
        lines += ["", "Interrupted: these are the numbers up to then."]
    return "\n".join(lines) + "\n"


def _client_cells(client: dict[str, Any]) -> tuple[str, str]:
    busy = max(client["busy"], default=0.0)
    note = f"{_n(client['us_per_token'], 1)} us of CPU per token"
    if client["is_the_limit"]:
        note += "; IT WAS THE LIMIT: use more --processes, --flush-ms or --via batch"
    return f"{busy:.0%} of a core", note


def _client(config: BenchConfig, outcome: Outcome) -> dict[str, Any]:
    wall_s = max(outcome.wall_s, 1e-9)
    busy = [cpu_s / wall_s for cpu_s in outcome.client_cpu_s]
    tokens = sum(record.output_tokens for record in outcome.records)
    cpu_s = sum(outcome.client_cpu_s)
    return {
        "processes": config.processes,
        "cpu_s": outcome.client_cpu_s,
        "busy": busy,
        "us_per_token": cpu_s / tokens * 1e6 if tokens else None,
        # What these processes could take if they did nothing else.
        "limit_tok_s": tokens / cpu_s * config.processes if cpu_s and tokens else None,
        "is_the_limit": any(share > BUSY_CLIENT for share in busy),
    }


def _goodput(
    config: BenchConfig, good: Sequence[RequestRecord], num_sent: int, seconds: float
) -> dict[str, Any]:
    num_met = sum(_meets_slo(config, record) for record in good)
    return {"share": _ratio(num_met, num_sent) or 0.0, "per_s": _ratio(num_met, seconds)}


def _meets_slo(config: BenchConfig, record: RequestRecord) -> bool:
    if record.first_s is None:
        return False
    ttft_ms = (record.first_s - record.sent_s) * 1e3
    tpot_s = _tpot_s(record)
    return (not config.slo_ttft_ms or ttft_ms <= config.slo_ttft_ms) and (
        not config.slo_itl_ms or tpot_s is None or tpot_s * 1e3 <= config.slo_itl_ms
    )


def _tpot_s(record: RequestRecord) -> float | None:
    if record.first_s is None or record.last_s is None or record.output_tokens < 2:
        return None
    return (record.last_s - record.first_s) / (record.output_tokens - 1)


def _busy_s(outcome: Outcome) -> float:
    """From the start to the last token, or to the last end where tokens have no times."""
    return max(
        (r.last_s if r.last_s is not None else r.end_s for r in outcome.records), default=0.0
    )


def _arrivals(parameters: dict[str, Any]) -> str:
    if parameters["arrivals"] == "closed":
        return f"{parameters['concurrency']} at a time"
    if parameters["arrivals"] == "poisson":
        return f"poisson at {parameters['rate']:g}/s"
    return "all at once" if parameters["arrivals"] == "burst" else "as in the trace"


def _spread_row(label: str, values: dict[str, Any]) -> str:
    cells = [_n(values.get(key), 2) for key in ("mean", "p50", "p90", "p99", "max")]
    return f"{label:<18}" + "".join(f"{cell:>10}" for cell in cells)


def _row(label: str, value: str, note: str = "") -> str:
    return f"{label:<18}{value:>14}  {note}".rstrip()


def _n(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(value: float, seconds: float) -> float | None:
    return value / seconds if seconds > 0 else None


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1e3, 4)
