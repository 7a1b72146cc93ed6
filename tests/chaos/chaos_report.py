"""A report for people: a line per kind of fault, then what the streams saw.

Owns the wording. Does not know how anything came about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.fault_schedule import FaultKind
from chaos.load_requests import RequestKind
from chaos.verifier import Tally

if TYPE_CHECKING:
    from chaos.chaos_run import ChaosReport


def render(report: ChaosReport) -> str:
    """All of it, several lines."""
    faults, active = report.faults or {}, report.active_faults or {}
    lines = [f"{'fault':<30}{'times':>7}{'while streams were active':>28}"]
    lines += [f"{kind:<30}{faults.get(kind, 0):>7}{active.get(kind, 0):>28}" for kind in FaultKind]
    share = report.num_active_faults / max(1, report.num_faults)
    lines.append(f"{'all':<30}{report.num_faults:>7}{report.num_active_faults:>21} = {share:>4.0%}")
    lines += ["", *_load_lines(report), "", *_kind_lines(report), "", *_verdict(report)]
    return "\n".join(lines)


def _load_lines(report: ChaosReport) -> list[str]:
    ends = dict(report.ends)
    numbers = {
        name: ends.pop(name, 0) for name in ("resumes", "replays", "cached tokens", "prompt tokens")
    }
    door = ends.pop("refused at the door", 0)
    batches, batch_resumes = ends.pop("batches", 0), ends.pop("batch resumes", 0)
    logged = report.logged
    return [
        "requests: " + ", ".join(f"{count} {name}" for name, count in sorted(ends.items())),
        f"  {numbers['resumes']} times a stream went on by itself, {numbers['replays']} times a "
        f"request was replayed, {door} first calls found nobody and were made again",
        f"  {batches} batches, which went on over a new stream {batch_resumes} times",
        f"  {numbers['cached tokens']} of {numbers['prompt tokens']} prompt tokens were cached; "
        f"{logged.get('adopted blocks', 0)} blocks were taken over after restarts, "
        f"{logged.get('refused entries', 0)} stale entries refused",
        f"  {logged.get('losses', 0)} workers lost, {logged.get('resets', 0)} resets, "
        f"{logged.get('steps back', 0)} control planes stepped back",
    ]


def _kind_lines(report: ChaosReport) -> list[str]:
    findings = report.findings
    lines = [
        f"{'compared':<20}{'requests':>9}{'complete':>9}{'resumed':>8}{'stopped':>8}"
        f"{'tokens':>8}{'chars':>8}{'wrong':>7}{'lost':>6}{'doubled':>8}"
    ]
    for kind in RequestKind:
        tally = report.tallies.get(kind, Tally())
        wrong, lost, doubled = (findings.count(k, kind) for k in ("wrong", "lost", "doubled"))
        lines.append(
            f"{kind:<20}{tally.num_requests:>9}{tally.num_complete:>9}{tally.num_resumed:>8}"
            f"{tally.num_stopped:>8}{tally.num_tokens:>8}{tally.num_chars:>8}"
            f"{wrong:>7}{lost:>6}{doubled:>8}"
        )
    return lines


def _verdict(report: ChaosReport) -> list[str]:
    findings, tallies = report.findings, report.tallies.values()
    num_tokens = sum(tally.num_tokens for tally in tallies)
    num_requests = sum(tally.num_requests for tally in tallies)
    lines = [
        f"{num_tokens} tokens of {num_requests} requests compared with the undisturbed "
        f"system in {report.seconds:.0f} s: {findings.count('wrong')} wrong, "
        f"{findings.count('lost')} lost, {findings.count('doubled')} doubled "
        f"({report.num_ties} draws decided by rounding)"
    ]
    if left := report.departures:
        lines.append(
            f"clients that left at the first tokens: {left.of_streams} of {left.asked} tokens of "
            f"streams were computed, {left.of_batch} of a batch's {left.asked}"
        )
    if warm := report.warm_restart:
        lines.append(
            f"2000-token prefix: {warm.hits_before} tokens hit before kill -9 of the control "
            f"plane, {warm.hits_after} right after; from restart to listening "
            f"{warm.listening_s:.2f} s, to the first token {warm.first_token_s:.2f} s"
        )
    if findings.any:
        lines += [f"FOUND: {item}" for item in findings.items]
        lines.append(
            f"seed {report.seed}, {findings.items[0].position}; the same faults again: "
            f"make chaos SEED={report.seed}"
        )
    else:
        lines.append(f"nothing found; seed {report.seed}")
    return lines
