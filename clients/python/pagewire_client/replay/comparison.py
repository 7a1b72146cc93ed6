"""Whether a worker can replay a recording, and the first thing that it did differently.

Owns: what counts as a difference, and how it is said. Does not know: streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos.pagewire.v1 import inference_pb2
from protos.recording_file import RecordingError

if TYPE_CHECKING:
    from protos.pagewire.v1 import worker_pb2
    from protos.recorded_rows import RecordedSequence, RowOutcome

_MAX_TOKENS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first result that is not as recorded.

    Attributes:
        where: Version, step and row.
        sequence: For people: whose row it is; empty if it is nobody's in particular.
        expected: As recorded.
        got: From the worker.
        hint: What may explain it; empty if nothing does.
    """

    where: str
    sequence: str
    expected: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"first difference: {self.where}"]
        for name in ("sequence", "expected", "got", "hint"):
            text = getattr(self, name)
            if text:
                lines.append(f"  {name + ':':<10}{text}")
        return "\n".join(lines)


def first_difference(
    version: int, step: int, recorded: list[RowOutcome], replayed: list[RowOutcome]
) -> Difference | None:
    """Compare what a step gave each row; a row that had stopped gave nothing."""
    want, have = _by_row(recorded), _by_row(replayed)
    for row in sorted(want.keys() | have.keys()):
        one, other = want.get(row), have.get(row)
        expected, got = _describe(one), _describe(other)
        if expected == got:
            continue
        sequence = (one or other).sequence  # type: ignore[union-attr]
        return Difference(
            where=f"plan {version}, step {step}, row {row}",
            sequence=describe_sequence(sequence, len((one or other).tokens)),  # type: ignore[union-attr]
            expected=expected,
            got=got,
        )
    return None


def describe_sequence(sequence: RecordedSequence, num_new: int) -> str:
    """What is known of a sequence; its request's id does not travel to workers."""
    parameters = sequence.parameters
    temperature = parameters.sampling.temperature
    how = "greedy" if not temperature else f"temperature {temperature:g}"
    before = max(0, sequence.num_outputs - num_new)
    return (
        f"prompt of {parameters.num_prompt_tokens} tokens, output token {before + 1}, seed "
        f"{parameters.seed}, {how}, in the row since plan {sequence.since}"
    )


def describe_failure(
    outcome: worker_pb2.StepResult | worker_pb2.Nack | worker_pb2.StepFailed,
) -> str:
    """A Nack or StepFailed in words."""
    name = type(outcome).__name__
    what = {"Nack": "refused the plan", "StepFailed": "failed at the step"}.get(name, "a result")
    if name == "StepResult":
        return what
    return f"{what}: {outcome.status.message[:500]}"  # type: ignore[union-attr]


def refusal(
    hello: worker_pb2.Hello, recorded: worker_pb2.Hello, *, model: str, version: str
) -> str | None:
    """Why this worker cannot replay what that one did; None if it can."""
    if hello.protocol_version != recorded.protocol_version:
        return (
            f"the worker speaks protocol version {hello.protocol_version}, the recording has "
            f"{recorded.protocol_version}. Use the pagewire version that made it: {version}"
        )
    geometry, wanted = hello.kv_geometry, recorded.kv_geometry
    if geometry.dtype == wanted.dtype and hello.model_fingerprint != recorded.model_fingerprint:
        return (
            f"the worker's model has fingerprint {hello.model_fingerprint.hex()}, the recording "
            f"was made with {recorded.model_fingerprint.hex()} ({model}). Point the worker at a "
            "copy of that model; configuration, tokenizer and weights all count"
        )
    for name, flag, value, limit in (
        ("KV data type", "--dtype", geometry.dtype, wanted.dtype),
        ("block size", "--block-size", geometry.block_size, wanted.block_size),
        ("num_blocks", "--num-blocks", hello.num_blocks, recorded.num_blocks),
        ("max_num_seqs", "--max-num-seqs", hello.max_num_seqs, recorded.max_num_seqs),
        ("max_model_len", "--max-model-len", hello.max_model_len, recorded.max_model_len),
        (
            "max_num_batched_tokens",
            "--max-num-batched-tokens",
            hello.max_num_batched_tokens,
            recorded.max_num_batched_tokens,
        ),
    ):
        if value != limit:
            return (
                f"the worker's {name} is {value}, that of the recording is {limit}. Start it with "
                f"{flag} {limit}"
            )
    if geometry != wanted:
        return (
            f"the worker's KV cache has {geometry.num_layers} layers of {geometry.num_kv_heads} "
            f"heads of {geometry.head_size}, that of the recording {wanted.num_layers} of "
            f"{wanted.num_kv_heads} of {wanted.head_size}: it is not the same model"
        )
    return None


def worker_flags(recorded: worker_pb2.Hello) -> list[str]:
    """Flags of a CPU worker that can replay a recording.

    Raises:
        RecordingError: No worker has such a KV cache on a CPU.
    """
    dtype = recorded.kv_geometry.dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise RecordingError(f"no CPU worker has a KV cache of type {dtype!r}")
    return [
        *("--device", "cpu", "--dtype", dtype),
        *("--block-size", str(recorded.kv_geometry.block_size)),
        *("--num-blocks", str(recorded.num_blocks)),
        *("--max-num-seqs", str(recorded.max_num_seqs)),
        *("--max-model-len", str(recorded.max_model_len)),
        *("--max-num-batched-tokens", str(recorded.max_num_batched_tokens)),
    ]


def _by_row(outcomes: list[RowOutcome]) -> dict[int, RowOutcome]:
    return {o.sequence.row: o for o in outcomes if o.tokens or o.finish_reason}


def _describe(outcome: RowOutcome | None) -> str:
    if outcome is None:
        return "no token: it had stopped before"
    tokens = outcome.tokens
    shown = ", ".join(map(str, tokens[:_MAX_TOKENS_SHOWN]))
    if len(tokens) > _MAX_TOKENS_SHOWN:
        shown += f", ... ({len(tokens)} of them)"
    text = {0: "no token", 1: f"token {shown}"}.get(len(tokens), f"tokens {shown}")
    return f"{text}, {_reason(outcome.finish_reason)}"


def _reason(number: int) -> str:
    if not number:
        return "goes on"
    try:
        name = inference_pb2.FinishReason.Name(number)
    except ValueError:
        name = str(number)
    return f"finished with {name.removeprefix('FINISH_REASON_')}"
