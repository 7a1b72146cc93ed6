"""GenerateRequest to Request: everything a client can get wrong is found here, before admission.

Owns: the defaults of the public API, and what only a model's limits decide. Does not know: live
requests, replicas, transports.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control_plane.errors import InvalidRequestError, UnsupportedFeatureError
from control_plane.output_processor import OutputProcessor, PastEndError
from control_plane.prompt_encoder import encode_prompt
from control_plane.request import FinishReason, Request, SamplingParams, check_num_stops
from control_plane.request_checks import (
    check_cache_salt,
    check_priority,
    check_prompt_length,
    check_request_id,
    checked_ids,
    flush_interval_s,
    read_resume,
    refuse_adapter,
    refuse_unsupported,
)
from control_plane.tokenizer import check_text

if TYPE_CHECKING:
    from control_plane.encoding_pool import EncodingPool
    from control_plane.model_catalog import CatalogModel, ModelCatalog
    from control_plane.output_processor import OutputChunk
    from control_plane.request_checks import Resume
    from protos.pagewire.v1 import inference_pb2

# Enough of a prompt's end for any detokenizer.
_PROMPT_TAIL = 64
# Of sampling parameters that are remembered: how many, and how large their messages are.
_MAX_KNOWN = 256
_MAX_KNOWN_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRequest:
    """An admissible request and what its output goes through.

    Attributes:
        request: To submit, unless every sequence has ended.
        model: The model that it names.
        processors: One per sequence.
        ended: Ends that a resume brought along or reached, by sequence index; their sequences have
            nothing to generate. None: the client has that end already.
        flush_interval_s: How long tokens may be gathered before a response is sent; None leaves it
            to the server.
    """

    request: Request
    model: CatalogModel
    processors: list[OutputProcessor]
    ended: dict[int, OutputChunk | None]
    flush_interval_s: float | None


class RequestBuilder:
    """Turns messages of clients into requests. One per process."""

    def __init__(
        self,
        catalog: ModelCatalog,
        pool: EncodingPool,
        *,
        max_n: int = 1,
        enforce_cache_salt: bool = False,
        max_priority: int | None = None,
    ) -> None:
        """Wire it up.

        Args:
            catalog: The served models.
            pool: Encodes long prompts.
            max_n: Most continuations of one request.
            enforce_cache_salt: Tenants never share prefixes, whatever salt they send.
            max_priority: Highest that a request may ask for; None: any.
        """
        self._catalog = catalog
        self._pool = pool
        self._max_n = max_n
        self._enforces_cache_salt = enforce_cache_salt
        self._max_priority = max_priority
        self._arrivals = itertools.count()
        # What was checked before, by the bytes of the message and the size of the vocabulary.
        self._known_sampling: dict[tuple[bytes, int], SamplingParams] = {}

    async def build(
        self, message: inference_pb2.GenerateRequest, *, req_id: str, tenant: str = ""
    ) -> BuiltRequest:
        """Check a message as a whole, tokenize its prompt and resolve its defaults.

        Args:
            message: From the client.
            req_id: The server's own id for it.
            tenant: Whom the request is accounted to; the cache salt if empty.

        Raises:
            ServingError: Whatever is wrong with the message.
        """
        model = self._catalog.find(message.model)
        check_request_id(message.request_id)
        check_cache_salt(message.cache_salt)
        check_priority(message.priority, self._max_priority)
        refuse_adapter(message.adapter)
        sampling = self._sampling(message.sampling, model.served.vocab_size)
        interval_s = flush_interval_s(message)
        resume = read_resume(message.resume, sampling.n, model.served)
        prompt = await encode_prompt(message, model, self._pool, tenant=tenant)
        check_prompt_length(prompt.size, model.served)
        # Left open, it ends where the model does, or the replica that it comes to.
        max_tokens = model.served.max_model_len - prompt.size
        if sampling.max_tokens is not None:
            max_tokens = min(max_tokens, sampling.max_tokens)
        request = Request(
            req_id=req_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_total_tokens=prompt.size + max_tokens,
            is_open_ended=sampling.max_tokens is None,
            arrival=next(self._arrivals),
            eos_token_ids=model.served.eos_token_ids,
            priority=message.priority,
            tenant=tenant or message.cache_salt,
            cache_salt=self._cache_salt(message, tenant),
            adapter=message.adapter,
            resume={index: ids for index, (ids, _) in resume.items()},
        )
        tail: list[int] = prompt[-_PROMPT_TAIL:].tolist()
        processors = [
            OutputProcessor(
                model.tokenizer.detokenizer(tail, skip_special_tokens=sampling.skip_special_tokens),
                sampling,
                eos_token_ids=model.served.eos_token_ids,
                max_tokens=max_tokens,
            )
            for _ in request.sequences
        ]
        return BuiltRequest(
            request=request,
            model=model,
            processors=processors,
            ended=_replay(request, processors, resume, max_tokens),
            flush_interval_s=interval_s,
        )

    def _cache_salt(self, message: inference_pb2.GenerateRequest, tenant: str) -> str:
        if not self._enforces_cache_salt:
            return message.cache_salt
        # A tenant's name has no slash: whatever it sends stays behind its own name.
        return f"{tenant}/{message.cache_salt}"

    def _sampling(self, message: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
        """Checked and resolved, by memory where somebody sent the same before: most do."""
        data = message.SerializeToString()
        known = self._known_sampling.get((data, vocab_size))
        if known is not None:
            return known
        sampling = self._read_sampling(message, vocab_size)
        if len(data) <= _MAX_KNOWN_BYTES:
            if len(self._known_sampling) >= _MAX_KNOWN:
                self._known_sampling.clear()
            self._known_sampling[data, vocab_size] = sampling
        return sampling

    def _read_sampling(
        self, message: inference_pb2.SamplingParams, vocab_size: int
    ) -> SamplingParams:
        refuse_unsupported(message)
        n = message.n if message.HasField("n") else 1
        if not 1 <= n <= self._max_n:
            # 1 is the neutral value of a feature that the server may be without.
            refusal = UnsupportedFeatureError if n > self._max_n == 1 else InvalidRequestError
            raise refusal(
                f"n must be in [1, {self._max_n}], got {n}. Send one request per continuation.",
                field="n",
                value=n,
                limit=f"[1, {self._max_n}]",
            )
        check_num_stops(len(message.stop), len(message.stop_token_ids))
        for i, stop in enumerate(message.stop):
            check_text(stop, field=f"stop[{i}]")
        checked_ids(message.stop_token_ids, "stop_token_ids", vocab_size)
        return SamplingParams(
            n=n,
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            min_tokens=message.min_tokens,
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            top_k=message.top_k,
            min_p=message.min_p,
            seed=message.seed if message.HasField("seed") else None,
            stop=tuple(message.stop),
            stop_token_ids=tuple(dict.fromkeys(message.stop_token_ids)),
            ignore_eos=message.ignore_eos,
            include_stop_str_in_output=message.include_stop_str_in_output,
            skip_special_tokens=(
                message.skip_special_tokens if message.HasField("skip_special_tokens") else True
            ),
        )


def _replay(
    request: Request, processors: list[OutputProcessor], resume: Resume, max_tokens: int
) -> dict[int, OutputChunk | None]:
    """Bring processors to where the client is, and find the sequences that have ended there."""
    ended: dict[int, OutputChunk | None] = {}
    for index, (ids, finish_reason) in resume.items():
        if len(ids) > max_tokens:
            raise InvalidRequestError(
                f"The resume of sequence {index} has {len(ids)} token ids, but the request ends "
                f"after {max_tokens}. Send the original prompt and max_tokens.",
                field="resume",
                value=len(ids),
                limit=max_tokens,
            )
        sequence = request.sequences[index]
        if finish_reason:
            sequence.finish_reason = FinishReason(finish_reason)
            processors[index].num_tokens = len(ids)
            ended[index] = None
            continue
        try:
            end = processors[index].resume(ids)
        except PastEndError as error:
            raise InvalidRequestError(
                f"The resume of sequence {index} has {len(ids)} token ids, but the sequence ended "
                f"after {error.num_tokens}. Send what was received, with its finish_reason.",
                field="resume",
                value=len(ids),
                limit=error.num_tokens,
            ) from None
        if end is not None:
            sequence.finish_reason = end.finish_reason
            ended[index] = end
    return ended
