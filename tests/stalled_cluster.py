"""A control plane in a process of its own, which a test stops and continues.

Prints its worker port, takes requests once a worker is there, says so, and at their end prints what
became of them: one line of JSON each.
"""

from __future__ import annotations

import asyncio
import json
import sys

from cluster_harness import collect, long_prompt, running_cluster, undisturbed, until

NUM_REQUESTS = 6


async def main(lease_s: float) -> None:
    async with running_cluster(lease_s=lease_s) as harness:
        print(json.dumps({"address": harness.address}), flush=True)
        await harness.ready()
        requests = [
            harness.request(long_prompt(i, output=40), max_tokens=40) for i in range(NUM_REQUESTS)
        ]
        streams = [harness.cluster.submit(request) for request in requests]
        await until(lambda: requests[0].sequences[0].output_token_ids)
        print(json.dumps({"running": len(requests)}), flush=True)
        outputs = await asyncio.gather(*map(collect, streams))
        stats = harness.cluster.stats()
        print(
            json.dumps(
                {
                    "right": outputs == [undisturbed(request) for request in requests],
                    "num_losses": [request.num_losses for request in requests],
                    "num_replicas_lost": stats.num_replicas_lost,
                    "num_stalls": stats.num_stalls,
                    "stalled_s": stats.stalled_s,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
