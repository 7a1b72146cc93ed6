"""Whole control planes, workers, clients and a store in one virtual time, moved by the test.

The real `Cluster` with everything below it, real worker protocols over a model of block contents,
and between them connections that deliver when the test says so, break on one side or on both, and
stay half open. Nothing waits, nothing happens by itself but what the control planes' own timers do.

`World.check` holds at any time; `World.come_to_rest` heals everything and lets all requests end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fake_model import _chain, expected_output
from world_base import WorldBase
from world_parts import (
    BLOCK_SIZE,
    EOS,
    HOLD_S,
    LEASE_S,
    MAX_MODEL_LEN,
    MODEL,
    REPLICA_WAIT_S,
    STEP_TIMEOUT_S,
    VOCAB_SIZE,
    CheckingRunner,
    Client,
    Plane,
    Worker,
)

from control_plane.errors import (
    AbortedError,
    ReplayLimitError,
    ShuttingDownError,
    UnavailableError,
)
from control_plane.request import FinishReason, Request, SamplingParams
from data_plane.step_work import RowSampling

if TYPE_CHECKING:
    from control_plane.token_stream import SequenceNews, TokenStream

__all__ = [
    "HOLD_S",
    "LEASE_S",
    "REPLICA_WAIT_S",
    "STEP_TIMEOUT_S",
    "Client",
    "Plane",
    "Worker",
    "World",
]


class World(WorldBase):
    """Everything. Close it when done."""

    # Clients.

    def new_client(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        temperature: float = 0.0,
        seed: int = 0,
        salt: str = "",
        priority: int = 0,
        stop_after: int | None = None,
        known: int = 0,
    ) -> Client:
        """A client that has sent nothing yet; `known` tokens it has from before."""
        total = min(len(prompt) + max_tokens, MAX_MODEL_LEN)
        expected, reason = expected_output(
            prompt,
            max_total_tokens=total,
            vocab_size=VOCAB_SIZE,
            sampling=RowSampling(temperature=temperature),
            eos_token_ids=(EOS,),
            seed=seed,
        )
        if stop_after is not None and not known < stop_after < len(expected):
            stop_after = None
        client = Client(
            f"q{len(self.clients)}", prompt, total, expected, reason, temperature, seed, salt,
            priority, stop_after, received=expected[: min(known, len(expected) - 1)],
        )  # fmt: skip
        self._learn_contents(client)
        self.clients.append(client)
        return client

    def _learn_contents(self, client: Client) -> None:
        request = self._request(client, resume=client.expected)
        tokens = client.prompt + client.expected
        chains: list[int] = []
        for token in tokens:
            chains.append(_chain(chains[-1] if chains else 0, token))
        hashes = self._hasher.extend(request.sequences[0], len(tokens))
        for index, name in enumerate(hashes):
            self.contents[name] = chains[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]

    def _request(self, client: Client, *, resume: list[int]) -> Request:
        self._arrivals += 1
        return Request(
            req_id=f"{client.name}-{self._arrivals}",
            prompt_token_ids=client.prompt,
            sampling=SamplingParams(
                temperature=client.temperature, max_tokens=client.max_total - len(client.prompt)
            ),
            seed=client.seed,
            max_total_tokens=client.max_total,
            arrival=self._arrivals,
            eos_token_ids=(EOS,),
            priority=client.priority,
            tenant=client.salt,
            cache_salt=client.salt,
            resume={0: list(resume)} if resume else None,
        )

    def send(self, client: Client, plane: Plane) -> None:
        """Begin, or resume with what was received so far."""
        self.send_together([client], plane)

    def send_together(self, clients: list[Client], plane: Plane) -> None:
        """Send the requests of several clients before the control plane plans anything."""
        if not plane.takes_requests:
            return

        async def submit() -> None:
            for client in clients:
                if client.is_over or client.plane is not None:
                    continue
                request = self._request(client, resume=client.received)
                try:
                    stream = plane.cluster.submit(request)
                except ShuttingDownError:
                    return
                client.plane, client.request = plane, request
                client.reader = self.loop.create_task(self._read(client, stream))

        self._do(submit())

    async def _read(self, client: Client, stream: TokenStream) -> None:
        try:
            while True:
                news = await stream.read()
                for one in news.sequences:
                    self._take(client, one)
                if news.ended:
                    assert client.reason is not None, client
                    break
        except (UnavailableError, ShuttingDownError):
            pass  # It tries again.
        except ReplayLimitError as error:
            assert client.request is not None
            assert client.request.num_losses == 3
            client.error = error
        except AbortedError:
            assert client.has_left, client
        except (Exception, AssertionError) as error:
            self.problems.append(error)
        client.plane = client.request = client.reader = None

    def _take(self, client: Client, news: SequenceNews) -> None:
        if client.reason is not None:
            # The end of a sequence that ended where its client found a stop string.
            assert not news.token_ids, (client, news)
            return
        client.received += news.token_ids
        end = client.stop_after
        if end is not None and len(client.received) >= end:
            del client.received[end:]
            assert client.plane is not None
            assert client.request is not None
            client.plane.cluster.finish(client.request.sequences[0], end, FinishReason.STOP)
            client.reason = FinishReason.STOP
        else:
            client.reason = news.finish_reason
        length = len(client.received)
        assert client.received == client.expected[:length], (client.received, client.expected)

    def leave(self, client: Client) -> None:
        """The client cancels."""
        client.has_left = True
        if client.plane is not None and client.request is not None:
            self._call(client.plane.cluster.abort, client.request)

    # What always holds.

    def check(self) -> None:
        self.run()
        for plane in self.planes:
            if plane.is_alive:
                plane.cluster.audit()
                self._check_live(plane)
        for worker in self.workers:
            self._check_worker(worker)

    def _check_live(self, plane: Plane) -> None:
        here = [client for client in self.clients if client.plane is plane]
        stats = plane.cluster.stats()
        # Those of a plane that is cut off go on without their clients until they end.
        assert len(here) <= stats.num_requests_live <= len(here) + len(plane.ghosts)
        held = stats.num_requests_unplaced
        for engine in plane.cluster.fleet:
            core = engine.core
            assert core.num_in_flight <= self.lookahead + 1
            assert core.num_in_flight == core.scheduler.num_in_flight_steps
            held += core.num_waiting + core.num_running
            if not core.attached:
                assert not core.scheduler.has_work
            elif not core.scheduler.has_work:
                assert core.unstarted_tokens == core.uncached_tokens == 0
        # One sequence each: all of them are somewhere, and nobody in two places. A request whose
        # only sequence has computed all there is awaits its results without a row.
        assert held <= stats.num_requests_live

    def _check_worker(self, worker: Worker) -> None:
        term = worker.protocol.highest_term
        assert term >= self.terms.get(worker.name, 0)
        self.terms[worker.name] = term
        connection = worker.connection
        if connection is None or connection.engine is None or connection.is_ended:
            return
        engine = connection.engine
        if not engine.is_on(connection) or engine.core.is_recovering:
            return
        runner: CheckingRunner = worker.runner  # type: ignore[assignment]
        for block_id, (name, generation) in engine.core.live_entries().items():
            assert runner.generations[block_id] == generation, f"block {block_id}"
            assert runner.contents(block_id) == self.contents[name], f"block {block_id}"

    def come_to_rest(self) -> None:
        """Heal everything: all requests end as they must, and nothing is held afterwards."""
        self.server.heal()
        for worker in self.workers:
            worker.is_hung = False
            worker.runner.fail_launch.clear()
        for plane in self.planes:
            if plane.is_cut and plane.is_alive:
                self.mend_plane(plane)
        plane = self._survivor()
        num_quiet = 0
        for _ in range(2000):
            if plane.has_stepped_back:
                plane = self._survivor()
            for worker in self.workers:
                if worker.has_exited:
                    self.crash(worker)
                self.attach(worker, plane)
            for client in self.clients:
                self.send(client, plane)
            if all(client.is_over for client in self.clients):
                break
            before = [replica.confirmed_version for replica in plane.cluster.stats().replicas]
            for worker in self.workers:
                self.round_trip(worker)
                self.round_trip(worker)
            num_quiet += 1
            if before != [replica.confirmed_version for replica in plane.cluster.stats().replicas]:
                num_quiet = 0
            elif num_quiet > 1:
                # The last message before the quiet was lost on a stream that lives on.
                self.wait(STEP_TIMEOUT_S)
                assert num_quiet < 20, self.describe()
            self.check()
        for client in self.clients:
            self._check_end(client)
        for _ in range(20):
            for worker in self.workers:
                self.round_trip(worker)
        plane.cluster.audit()
        stats = plane.cluster.stats()
        assert stats.num_requests_live == stats.num_requests_unplaced == 0
        for replica in stats.replicas:
            assert replica.free_blocks == replica.usable_blocks, replica

    def describe(self) -> str:
        """For messages of failures."""
        planes = [
            f"{p.name} term={p.cluster.stats().term} stepped_back={p.has_stepped_back} "
            f"ready={p.cluster.num_ready(MODEL.name)} live={p.cluster.stats().num_requests_live}"
            for p in self.planes
            if p.is_alive
        ]
        workers = [
            f"{w.name} {w.protocol.phase.value} term={w.protocol.highest_term} "
            f"exited={w.has_exited} on={w.connection and w.connection.stream_id}"
            for w in self.workers
        ]
        live = [
            f"{c.name} {len(c.received)} of {len(c.expected)} at {c.plane and c.plane.name}"
            for c in self.clients
            if not c.is_over
        ]
        return f"planes: {planes}; workers: {workers}; live: {live}"

    def _survivor(self) -> Plane:
        """The plane that all workers accept: a new one, or the one that is there."""
        highest = max(worker.protocol.highest_term for worker in self.workers)
        fit = [
            plane
            for plane in self.planes
            if plane.is_alive
            and plane.cluster.stats().term in (0, highest)
            and not plane.has_stepped_back
        ]
        survivor = fit[-1] if fit else self.start_plane()
        for plane in list(self.planes):
            if plane.is_alive and plane is not survivor:
                self.kill_plane(plane)
        return survivor

    def _check_end(self, client: Client) -> None:
        assert client.is_over, client
        if client.error is not None or client.has_left:
            return
        if client.stop_after is not None:
            assert client.received == client.expected[: client.stop_after]
        else:
            assert client.received == client.expected
            assert client.reason == client.expected_reason
