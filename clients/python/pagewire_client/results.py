"""What calls give back, as plain values.

Owns: the log of one generation, from which it can be resumed. Does not know: transports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.pagewire.v1 import inference_pb2

if TYPE_CHECKING:
    from pagewire_client.errors import PagewireError

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
    inference_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    replays: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """News of one sequence.

    Attributes:
        index: Which of the `n` continuations.
        text: Text since the previous chunk; never half a character.
        token_ids: The ids of exactly that text.
        finish_reason: "stop", "length", "abort" or "error" in the last chunk, else None.
        stop_string: The stop string that matched, if one did.
        stop_token_id: The stop token that was generated, if one was.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class Output:
    """All of one sequence so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request; `text`, `token_ids`, `finish_reason` are of the first sequence."""

    request_id: str
    seed: int
    outputs: list[Output]
    usage: Usage

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One answer of a batch: a completion or an error."""

    request_id: str
    completion: Completion | None
    error: PagewireError | None


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    ready_replicas: int
    has_chat_template: bool


class GenerationLog:
    """Everything received of one generation, and the request that continues it."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.request_id = request.request_id
        self.seed: int | None = None
        self.usage: Usage | None = None
        self.outputs: dict[int, Output] = {}

    def add(self, response: inference_pb2.GenerateResponse) -> list[Chunk]:
        """Take a response; what is new in it, per sequence."""
        if response.request_id:
            self.request_id = response.request_id
        if response.HasField("seed"):
            self.seed = response.seed
        if response.HasField("usage"):
            self.usage = to_usage(response.usage)
        chunks = [_to_chunk(output) for output in response.outputs]
        for chunk in chunks:
            output = self.outputs.setdefault(chunk.index, Output(chunk.index))
            output.text += chunk.text
            output.token_ids += chunk.token_ids
            output.finish_reason = chunk.finish_reason
            output.stop_string = chunk.stop_string
            output.stop_token_id = chunk.stop_token_id
        return chunks

    def resume_request(self) -> inference_pb2.GenerateRequest:
        """The request that continues from here, after the stream broke.

        It repeats the prompt and the parameters, carries the seed of the first response, and what
        was received of each sequence, in this call and in those that it resumed itself.
        """
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.request_id = self.request_id
        if self.seed is not None:
            request.sampling.seed = self.seed
        reasons = {name: number for number, name in _FINISH_REASONS.items()}
        entries = {entry.index: entry for entry in request.resume}
        for output in self.outputs.values():
            entry = entries.get(output.index) or request.resume.add(index=output.index)
            entry.token_ids.extend(output.token_ids)
            if output.finish_reason is not None:
                entry.finish_reason = reasons[output.finish_reason]
        if not request.resume:
            # Nothing was received yet; the entry says that this takes the id over all the same.
            request.resume.add(index=0)
        return request

    @property
    def has_begun(self) -> bool:
        """Whether the server has answered: it names id and seed before any token."""
        return self.seed is not None

    @property
    def has_tokens(self) -> bool:
        """Whether any output was received."""
        return any(output.token_ids for output in self.outputs.values())

    def completion(self) -> Completion:
        """All of it, once the stream has ended."""
        return Completion(
            request_id=self.request_id,
            seed=self.seed or 0,
            # A resumed request may have had nothing left to say.
            outputs=[self.outputs[i] for i in sorted(self.outputs)] or [Output(0)],
            usage=self.usage or Usage(0, 0, 0, 0),
        )


def to_usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.replays)


def to_model(model: inference_pb2.Model) -> Model:
    return Model(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        ready_replicas=model.ready_replicas,
        has_chat_template=model.has_chat_template,
    )


def _to_chunk(output: inference_pb2.SequenceOutput) -> Chunk:
    stop = output.WhichOneof("stop_reason")
    return Chunk(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=_FINISH_REASONS.get(output.finish_reason),
        stop_string=output.stop_string if stop == "stop_string" else None,
        stop_token_id=output.stop_token_id if stop == "stop_token_id" else None,
    )
