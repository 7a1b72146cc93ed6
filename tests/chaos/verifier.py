"""Says whether what streams received is what the undisturbed system gives.

Owns: the undisturbed system's answers, the comparison, the judgement of ties. Does not know:
faults, how streams were read.

The undisturbed system gets the same request with the seed that the first response named. Sums of
fp32 depend on the shape of a batch, so that rounding can decide between two tokens that are nearly
as good. Such a tie is recognised by transformers in fp64: it has to draw either token when its
logits are moved by no more than rounding could. From there on the stream is compared with what the
undisturbed system makes of the stream's own token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from chaos.comparison import Difference, compare_tokens
from chaos.load_requests import RequestKind
from chaos.text_oracle import TextOracle
from pagewire_client import build_request

from data_plane.sampler import SamplingBatch, sample

if TYPE_CHECKING:
    from pathlib import Path

    from chaos.findings import Findings
    from chaos.streams import StreamRecord
    from pagewire_client import AsyncClient, Completion, GenerateOptions

    from protos.pagewire.v1 import inference_pb2

_NUM_READERS = 4
_MAX_TIES = 3
# Three times the largest difference seen between fp32 in batches of any shape and fp64.
_ROUNDING = 2e-4
_NUM_DRAWS = 512

Key = tuple[object, ...]


@dataclass(slots=True)
class Tally:
    """What was compared of one kind of request and is right.

    Attributes:
        num_requests: All of them.
        num_complete: Those that got to their end.
        num_resumed: Those whose call went on by itself.
        num_stopped: Those that a token or a string ended.
        num_tokens: Received.
        num_chars: Of their text.
    """

    num_requests: int = 0
    num_complete: int = 0
    num_resumed: int = 0
    num_stopped: int = 0
    num_tokens: int = 0
    num_chars: int = 0

    def add(self, record: StreamRecord) -> None:
        self.num_requests += 1
        self.num_complete += record.is_complete
        self.num_resumed += record.num_resumes > 0
        self.num_stopped += record.finish_reason == "stop"
        self.num_tokens += len(record.token_ids)
        self.num_chars += len(record.text)


class TieJudge:
    """Recognises draws that rounding decides, with transformers in fp64."""

    def __init__(self, model_dir: Path, *, rounding: float = _ROUNDING) -> None:
        """Load the model; `rounding` is how far a logit may be from what it should be."""
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
        self._model.eval()
        self._rounding = rounding

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[vocab_size] float64, of what follows."""
        return self._model(torch.tensor([token_ids])).logits[0, -1]

    @torch.inference_mode()
    def is_tie(
        self,
        prompt: list[int],
        before: list[int],
        tokens: tuple[int, int],
        options: GenerateOptions,
        seed: int,
    ) -> bool:
        """Whether either of two tokens may follow prompt and output."""
        ids = [*prompt, *before]
        logits = self.logits(ids)
        noise = torch.empty(_NUM_DRAWS, logits.shape[-1], dtype=logits.dtype)
        noise.uniform_(
            -self._rounding, self._rounding, generator=torch.Generator().manual_seed(len(ids))
        )
        signed = seed - 2**64 if seed >= 2**63 else seed

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((_NUM_DRAWS,), value, dtype=dtype)

        drawn = sample(
            (logits + noise).float(),
            SamplingBatch(
                temperature=column(options.get("temperature", 1.0), torch.float32),
                top_k=column(options.get("top_k", 0), torch.int64),
                top_p=column(options.get("top_p", 1.0), torch.float32),
                min_p=column(options.get("min_p", 0.0), torch.float32),
                seed=torch.full((_NUM_DRAWS,), signed, dtype=torch.int64),
                sequence_index=column(0, torch.int64),
                position=column(len(ids), torch.int64),
            ),
        )
        return set(tokens) <= set(drawn.tolist())


class Verifier:
    """Compares streams as they end.

    Attributes:
        tallies: What was compared and is right, by kind of request.
        num_ties: Draws that rounding decided.
    """

    def __init__(self, client: AsyncClient, model_dir: Path, findings: Findings) -> None:
        self.tallies = {kind: Tally() for kind in RequestKind}
        self.num_ties = 0
        self._client = client
        self._model_dir = model_dir
        self._texts = TextOracle(model_dir)
        self._findings = findings
        self._queue: asyncio.Queue[StreamRecord] = asyncio.Queue()
        self._answers: dict[Key, asyncio.Task[Completion]] = {}
        self._judge: TieJudge | None = None

    def put(self, record: StreamRecord) -> None:
        self._queue.put_nowait(record)

    @property
    def num_tokens(self) -> int:
        """Compared and right."""
        return sum(tally.num_tokens for tally in self.tallies.values())

    @property
    def num_requests(self) -> int:
        """Likewise."""
        return sum(tally.num_requests for tally in self.tallies.values())

    @property
    def num_waiting(self) -> int:
        return self._queue.qsize()

    async def run(self) -> None:
        """Compare until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_READERS):
                tasks.create_task(self._read())

    async def finish(self) -> None:
        """Wait until everything that was put is compared."""
        await self._queue.join()

    async def _read(self) -> None:
        while True:
            record = await self._queue.get()
            await self._verify(record)
            self._queue.task_done()

    async def _verify(self, record: StreamRecord) -> None:
        answer = await self._answer(record)
        expected = answer.token_ids
        num_ties = 0
        while difference := compare_tokens(
            record.token_ids, expected, is_complete=record.is_complete
        ):
            if num_ties == _MAX_TIES or not await self._is_tie(record, expected, difference):
                self._report(record, difference)
                return
            num_ties += 1
            known = record.token_ids[: difference.at + 1]
            answer = await self._continue(record, known)
            expected = [*known, *answer.token_ids]
        self.num_ties += num_ties
        if self._compare_texts(record) and self._compare_end(
            record, answer, is_whole=num_ties == 0
        ):
            self.tallies[record.request.kind].add(record)

    def _compare_texts(self, record: StreamRecord) -> bool:
        """Compare the text with that of the ids, wherever the stream was cut and at its end."""
        request, text = record.request, record.text
        cuts = [
            (num_ids, text[:num_chars], self._texts.text(request, record.token_ids[:num_ids]))
            for num_ids, num_chars in record.resumed_at
        ]
        whole, stop_string = self._texts.expected(record)
        cuts.append((len(record.token_ids), text, whole))
        for num_ids, received, expected in cuts:
            difference = compare_tokens(
                [*map(ord, received)], [*map(ord, expected)], is_complete=True
            )
            if difference is not None:
                self._report(
                    record,
                    Difference(
                        difference.kind,
                        difference.at,
                        f"text of {num_ids} tokens is {received!r} instead of {expected!r}",
                    ),
                )
                return False
        if record.is_complete and record.stop_string != stop_string:
            self._report_wrong(record, "stop string", record.stop_string, stop_string)
            return False
        return True

    def _compare_end(self, record: StreamRecord, answer: Completion, *, is_whole: bool) -> bool:
        """Compare what goes with the tokens: text, reason, usage."""
        if not record.is_complete:
            if is_whole and not answer.text.startswith(record.text):
                self._report(record, Difference("wrong", 0, f"text {record.text!r}"))
                return False
            return True
        output = answer.outputs[0]
        checks: list[tuple[str, object, object]] = [
            ("finish reason", record.finish_reason, output.finish_reason),
            ("stop string", record.stop_string, output.stop_string),
        ]
        if is_whole:
            checks.append(("text", record.text, answer.text))
        if record.usage is not None:
            checks.append(
                ("completion_tokens", record.usage.completion_tokens, len(record.token_ids))
            )
        wrong = [check for check in checks if check[1] != check[2]]
        for what, received, expected in wrong:
            self._report_wrong(record, what, received, expected)
        return not wrong

    def _report_wrong(
        self, record: StreamRecord, what: str, received: object, expected: object
    ) -> None:
        text = f"{what} is {received!r} instead of {expected!r}"
        self._report(record, Difference("wrong", len(record.token_ids), text))

    def _report(self, record: StreamRecord, difference: Difference) -> None:
        first, last = record.positions
        request = record.request
        self._findings.add(
            difference.kind,
            f"{request.name}, {len(record.token_ids)} tokens, from {first} to {last}, "
            f"{record.num_resumes} resumes, usage {record.usage}: {difference.text}; options "
            f"{request.options}, seed {record.seed}",
            request_kind=request.kind,
        )

    # The undisturbed system.

    async def _answer(self, record: StreamRecord) -> Completion:
        request = record.request
        key: Key = (
            request.prompt if isinstance(request.prompt, str) else tuple(map(str, request.prompt)),
            repr(sorted(request.options.items())),
            record.seed if request.draws != "greedy" else 0,
        )
        if request.draws == "unseeded":
            # Never asked again.
            return await self._ask(record)
        task = self._answers.get(key)
        if task is None:
            task = self._answers[key] = asyncio.create_task(self._ask(record))
        return await asyncio.shield(task)

    async def _ask(self, record: StreamRecord) -> Completion:
        return await self._client.start(_seeded_request(record)).result()

    async def _continue(self, record: StreamRecord, token_ids: list[int]) -> Completion:
        request = _seeded_request(record)
        request.resume.add(index=0, token_ids=token_ids)
        return await self._client.start(request).result()

    # Ties.

    async def _is_tie(
        self, record: StreamRecord, expected: list[int], difference: Difference
    ) -> bool:
        at, request = difference.at, record.request
        if at >= min(len(record.token_ids), len(expected)):
            return False
        prompt: Any = request.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            prompt = await self._client.tokenize(prompt)
        if self._judge is None:
            self._judge = await asyncio.to_thread(TieJudge, self._model_dir)
        return await asyncio.to_thread(
            self._judge.is_tie,
            list(prompt),
            record.token_ids[:at],
            (record.token_ids[at], expected[at]),
            request.options,
            record.seed,
        )


def _seeded_request(record: StreamRecord) -> inference_pb2.GenerateRequest:
    """The same request, with the seed that was resolved for it."""
    return build_request(record.request.prompt, {**record.request.options, "seed": record.seed})
