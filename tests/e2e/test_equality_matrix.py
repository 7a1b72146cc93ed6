"""The output must not depend on how it is computed: greedy fp32 equals transformers.

One factor varies at a time, then all hard values together. The path is the whole one (client, gRPC,
control plane, control stream, worker, paged cache); only processes are left out, so that twenty
stacks fit into a test run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from pagewire_client import build_request
from real_stack import RealStack, Setting, SharedModel, load_shared_model, running_stack

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire_client import Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_TOKENS = 16
_STORY = (
    "The lighthouse keeper wrote a letter every evening and never sent one. Today he wrote: the "
    "sea was grey in the morning and green at noon, two ships passed, and a gull stole my bread. "
)
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "Apple."},
        {"role": "user", "content": "Another one, please."},
    ],
]
TEXTS = [
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Der schnelle braune Fuchs springt über den faulen Hund. 敏捷的棕色狐狸跳过懒狗。 Быстрая лиса",
    "🎉🎂 Happy birthday! 👩‍👩‍👧‍👦 We wish you 🌈 and",
    _STORY * 16 + "The last letter began:",
]
NUM_SHARING = 16


class Expected:
    """transformers' greedy continuations, each computed once."""

    def __init__(self, model: SharedModel) -> None:
        from transformers import AutoModelForCausalLM

        self._reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        self._cache: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        key = (max_tokens, *prompt)
        if key not in self._cache:
            ids = torch.tensor([prompt])
            output = self._reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            self._cache[key] = output[0, len(prompt) :].tolist()
        return self._cache[key]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> SharedModel:
    return load_shared_model(model_dir)


@pytest.fixture(scope="module")
def expected(model: SharedModel) -> Expected:
    return Expected(model)


@pytest.fixture(scope="module")
def prompts(model: SharedModel) -> list[list[int]]:
    tokenizer = model.catalog.tokenizer
    chats = [tokenizer.encode_chat(chat).tolist() for chat in CHATS]
    texts = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert max(map(len, texts)) > 600
    return chats + texts


@pytest.fixture(scope="module")
def sharing_prompts(model: SharedModel) -> list[list[int]]:
    """Prompts with a common beginning that ends inside a block, of every offset."""
    shared = model.catalog.tokenizer.encode(_STORY * 2).tolist()
    endings = model.catalog.tokenizer.encode("He went out into the rain").tolist()
    return [
        shared[: len(shared) - i % 5] + endings[: 1 + i % len(endings)] for i in range(NUM_SHARING)
    ]


async def generate(
    stack: RealStack, prompts: list[list[int]], max_tokens: int = MAX_TOKENS
) -> list[list[int]]:
    completions: list[Completion] = await asyncio.gather(
        *(
            stack.api.client.complete(
                prompt, max_tokens=max_tokens, temperature=0.0, timeout_s=300.0
            )
            for prompt in prompts
        )
    )
    return [list(completion.token_ids) for completion in completions]


SETTINGS = {
    "base": Setting(),
    "no_prefix_caching": Setting(prefix_caching=False),
    "block_size_32": Setting(block_size=32, num_blocks=200),
    "block_size_64": Setting(block_size=64, num_blocks=100),
    "chunks_of_7": Setting(max_num_batched_tokens=7, max_num_seqs=4),
    "chunks_of_64": Setting(max_num_batched_tokens=64),
    "lookahead_0": Setting(lookahead=0),
    "lookahead_1": Setting(lookahead=1),
    "lookahead_4": Setting(lookahead=4),
    "lookahead_16": Setting(lookahead=16),
    "three_workers": Setting(num_workers=3),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_greedy_output_equals_transformers(
    name: str, model: SharedModel, prompts: list[list[int]], expected: Expected
) -> None:
    async with running_stack(model, SETTINGS[name]) as stack:
        outputs = await generate(stack, prompts)
        assert outputs == [expected(prompt) for prompt in prompts]


async def test_output_is_the_same_from_a_warm_cache(
    model: SharedModel, prompts: list[list[int]], expected: Expected
) -> None:
    async with running_stack(model, Setting()) as stack:
        cold = await generate(stack, prompts)
        hits = stack.prefix_hits()
        warm = await generate(stack, prompts)
        assert stack.prefix_hits() - hits >= 600
        assert cold == warm == [expected(prompt) for prompt in prompts]


async def test_output_is_the_same_when_sequences_are_preempted_many_times(
    model: SharedModel, sharing_prompts: list[list[int]], expected: Expected
) -> None:
    # Eight rows of two blocks that all grow to five want 40 blocks; 16 are there.
    setting = Setting(num_blocks=17, max_num_seqs=8, max_model_len=128, prefix_caching=False)
    prompts = [prompt[-(20 + i) :] for i, prompt in enumerate(sharing_prompts[:8])]
    async with running_stack(model, setting) as stack:
        outputs = await generate(stack, prompts, max_tokens=48)
        assert stack.num_preemptions() >= 5
        assert outputs == [expected(prompt, 48) for prompt in prompts]


async def test_concurrent_requests_that_share_a_prefix_equal_transformers(
    model: SharedModel, sharing_prompts: list[list[int]], expected: Expected
) -> None:
    async with running_stack(model, Setting(max_num_seqs=16)) as stack:
        outputs = await generate(stack, sharing_prompts)
        assert stack.prefix_hits() > 0
        assert outputs == [expected(prompt) for prompt in sharing_prompts]


async def test_all_hard_values_together_equal_transformers(
    model: SharedModel, sharing_prompts: list[list[int]], expected: Expected
) -> None:
    setting = Setting(
        num_workers=3,
        block_size=32,
        num_blocks=9,
        max_num_seqs=6,
        max_num_batched_tokens=7,
        max_model_len=256,
        lookahead=4,
    )
    async with running_stack(model, setting) as stack:
        outputs = await generate(stack, sharing_prompts)
        assert stack.num_preemptions() > 0
        assert outputs == [expected(prompt) for prompt in sharing_prompts]


async def test_a_resumed_request_continues_exactly_after_five_tokens(
    model: SharedModel, prompts: list[list[int]], expected: Expected
) -> None:
    async with running_stack(model, Setting()) as stack:
        for prompt in prompts[:4]:
            request = build_request(prompt, {"max_tokens": MAX_TOKENS, "temperature": 0.0})
            generation = stack.api.client.start(request)
            async with generation:
                async for _ in generation:
                    if len(generation.log.completion().token_ids) >= 5:
                        break
            got = list(generation.log.completion().token_ids)
            resumed = await stack.api.client.start(generation.log.resume_request()).result()
            assert got + list(resumed.token_ids) == expected(prompt)


async def test_seeded_draws_are_the_same_alone_in_a_batch_and_after_preemption(
    model: SharedModel, sharing_prompts: list[list[int]]
) -> None:
    async def draw(stack: RealStack, prompt: list[int], seed: int) -> list[int]:
        completion = await stack.api.client.complete(
            prompt, max_tokens=48, temperature=0.8, top_k=40, top_p=0.95, seed=seed
        )
        return list(completion.token_ids)

    async with running_stack(model, Setting()) as stack:
        alone = [await draw(stack, prompt, i) for i, prompt in enumerate(sharing_prompts[:6])]
    crowded = Setting(num_blocks=20, max_model_len=256, prefix_caching=False, lookahead=4)
    async with running_stack(model, crowded) as stack:
        together = await asyncio.gather(
            *(draw(stack, prompt, i) for i, prompt in enumerate(sharing_prompts[:6]))
        )
        assert stack.num_preemptions() > 0
    assert together == alone
    assert len({tuple(ids) for ids in alone}) > 1


async def test_killed_worker_costs_no_token(
    model: SharedModel, sharing_prompts: list[list[int]], expected: Expected
) -> None:
    async with running_stack(model, Setting(num_workers=2)) as stack:
        work = asyncio.ensure_future(generate(stack, sharing_prompts[:6], max_tokens=32))
        cluster = stack.api.control_plane.cluster
        while not all(r.generation_tokens >= 6 for r in cluster.stats().replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await stack.kill(0)
        assert await work == [expected(prompt, 32) for prompt in sharing_prompts[:6]]
        assert cluster.stats().num_replays > 0
