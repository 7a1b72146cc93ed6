"""The HTTP port: metrics for Prometheus, and whether the process serves.

Connections have threads, everything that they ask for lives on the event loop: a thread asks the
loop, and waits for no longer than a limit.

Owns: connections and their bounds. Does not know: what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from control_plane.metrics import Metrics
    from control_plane.stats import ClusterSnapshot

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 4.0
_IDLE_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 32
# In which a connection that was ended gives its thread back.
_FREE_SLOT_S = 0.5


class _LoopCollector(Collector):
    """Collects on the event loop, for a scrape that comes in on a thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        metrics: Metrics,
        stats: Callable[[], ClusterSnapshot],
    ) -> None:
        self._loop = loop
        self._metrics = metrics
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()  # or registration would collect once, before the loop runs

    def collect(self) -> Iterable[Metric]:
        if self._loop.is_closed():
            return []
        future = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)
        return future.result(timeout=_SCRAPE_TIMEOUT_S)

    async def _collect(self) -> list[Metric]:
        return list(self._metrics.families(self._stats()))


def _ask(loop: asyncio.AbstractEventLoop, serves: Callable[[], bool]) -> bool:
    """What `serves` says on the loop; a loop that does not come to it serves nobody."""

    async def ask() -> bool:
        return serves()

    if loop.is_closed():
        return False
    future = asyncio.run_coroutine_threadsafe(ask(), loop)
    try:
        return future.result(timeout=_HEALTH_TIMEOUT_S)
    except TimeoutError:
        future.cancel()
        return False


class _ScrapeServer(ThreadingHTTPServer):
    """A thread per connection, of which there are only so many.

    Whoever is in longest goes for whoever comes: a scrape takes milliseconds, and who holds all
    connections, saying little or nothing, must not keep the others from asking for health.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # oldest first
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self._end_oldest()
            if not self._slots.acquire(timeout=_FREE_SLOT_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _end_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open), None)
            if oldest is not None:
                del self._open[oldest]
                # Its thread reads an end, unless it waits for the loop.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line, not the library's traceback; a peer that hung up is none."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            logger.warning("scrape failed: error=%s", type(error).__name__)


class MetricsServer:
    """The HTTP port that Prometheus scrapes, and that says whether the process serves.

    Health is here too because who asks for it, such as a container engine on the same machine, has
    neither a certificate nor a host name that the public port's certificate is for.
    """

    def __init__(
        self,
        metrics: Metrics,
        stats: Callable[[], ClusterSnapshot],
        *,
        host: str,
        port: int,
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        """Listen at once; call on the running loop.

        Args:
            metrics: What is counted here.
            stats: What the cluster says of itself; called on the loop.
            host: Address to bind.
            port: 0 takes a free one.
            serves: What /healthz answers; called on the loop.

        Raises:
            OSError: The port is taken, or the host is none.
        """
        registry = CollectorRegistry()
        loop = asyncio.get_running_loop()
        registry.register(_LoopCollector(loop, metrics, stats))

        class Handler(MetricsHandler):
            timeout = _IDLE_TIMEOUT_S

            def do_GET(self) -> None:  # noqa: N802 - the base class's name
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    super().do_GET()
                elif path == "/healthz":
                    is_well = _ask(loop, serves)
                    self.send_response(200 if is_well else 503)
                    self.end_headers()
                    self.wfile.write(b"serving\n" if is_well else b"not serving\n")
                else:
                    self.send_error(404, "Only /metrics and /healthz are here")

        Handler.registry = registry
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("Server", (_ScrapeServer,), {"address_family": family})
        self._server: ThreadingHTTPServer = server_class((host, port), Handler)
        self.port: int = self._server.server_port
        # A short interval: it is what `close` waits for.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        # In a thread: a scrape under way waits for the loop.
        await asyncio.to_thread(self._server.shutdown)
        await asyncio.to_thread(self._thread.join)
        self._server.server_close()
