"""Damaged messages on the worker port itself: they cost their sender its stream, nobody else."""

from __future__ import annotations

import random
from collections import Counter

from cluster_harness import RawPeer, collect, hello, long_prompt, running_cluster, undisturbed
from fuzz_situations import Scenario
from message_mutator import Mutator

NUM_STREAMS = 60
MESSAGES_PER_STREAM = 25


async def test_streams_of_damaged_messages_disturb_no_other_replica() -> None:
    rng = random.Random(6)
    scenario = Scenario(6, is_recorded=True)
    scenario.play(80)
    valid = [situation.message for situation in scenario.for_control]
    mutator = Mutator(rng, valid, range(24))
    greetings = Mutator(rng, [hello()], range(24))
    reasons: Counter[str] = Counter()
    async with running_cluster() as harness, harness.worker():
        await harness.ready()
        requests = [harness.request(long_prompt(i), max_tokens=24) for i in range(8)]
        streams = []
        for number in range(NUM_STREAMS):
            async with RawPeer(harness.address) as peer:
                # Two of three get in, and say something wrong there.
                await peer.say(greetings.mutate(hello()) if number % 3 == 0 else hello())
                try:
                    for _ in range(MESSAGES_PER_STREAM):
                        await peer.say(mutator.mutate(rng.choice(valid)))
                except Exception as error:
                    # The stream has ended before everything was said.
                    reasons[type(error).__name__] += 1
                peer.call.cancel()
            if number < len(requests):
                streams.append(harness.cluster.submit(requests[number]))
        for request, stream in zip(requests, streams, strict=True):
            assert await collect(stream) == undisturbed(request)
        later = harness.request(long_prompt(9), max_tokens=24)
        assert await collect(harness.cluster.submit(later)) == undisturbed(later)
        harness.assert_nothing_held()
