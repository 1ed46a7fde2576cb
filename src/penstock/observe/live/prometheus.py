"""A running program's numbers for Prometheus. The one file that imports prometheus_client
(`pip install "penstock[prometheus]"`).

Counters are read on each request, in the endpoint's own threads. Nothing is pushed, and the program never waits for a
client. The endpoint listens on the loopback address only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from penstock.core.errors import OptionError
from penstock.observe.live.loader_registry import LoaderRegistry

_HOST = "127.0.0.1"

_COUNTERS = (
    ("penstock_batches", "Batches handed out.", "batches"),
    ("penstock_samples", "Samples in the batches handed out.", "samples"),
    ("penstock_bytes", "Bytes of the batches handed out.", "nbytes"),
    ("penstock_epochs", "Finished epochs.", "epochs"),
    ("penstock_worker_restarts", "Workers that died and were replaced.", "restarts"),
    ("penstock_samples_skipped", "Samples skipped or replaced after an error.", "skipped"),
)
_STAGES = ("fetch", "collate", "transport", "wait", "step")
_SLOTS = ("free", "filling", "ready", "held", "copying")


class Endpoint:
    """Serves the numbers of the registered loaders at http://127.0.0.1:`port`/metrics.

    The constructor binds the port, so that a port in use fails at once; requests are answered after `start`.
    Call order: constructor, `start` (repeated calls do nothing), `close`.

    Args:
        registry: the loaders.
        port: where to listen; 0 for any free port (see `port`).

    Raises:
        OptionError: prometheus_client is not installed, or the port is in use.
    """

    def __init__(self, registry: LoaderRegistry, port: int) -> None:
        client = _client()
        collectors = client.CollectorRegistry(auto_describe=False)
        collectors.register(_Collector(registry))
        try:
            self._server = make_server(_HOST, port, client.make_wsgi_app(collectors), _Server, _Silent)
        except (OSError, OverflowError) as exc:
            raise OptionError(
                f"port {port} of {_HOST} cannot be opened ({exc}); give another --prometheus PORT"
            ) from exc
        self.port = int(self._server.server_port)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to answer requests."""
        if self._thread is None:
            thread = threading.Thread(target=self._server.serve_forever, name="penstock-prometheus", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python starts no thread when its main one has ended
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Stop answering and close the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


class _Collector:
    """Reads the loaders' counters on each scrape; see prometheus_client's custom collectors."""

    def __init__(self, registry: LoaderRegistry) -> None:
        self._registry = registry

    def describe(self) -> list[Any]:
        """Return nothing: the names are known at the first scrape only."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield each family of metrics, with one sample per loader."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counters = [(loader.label, loader.statistics()) for loader in self._registry.iterated()]
        for name, description, field in _COUNTERS:
            family = CounterMetricFamily(name, description, labels=["loader"])
            for loader, now in counters:
                family.add_metric([loader], getattr(now, field))
            yield family
        stages = CounterMetricFamily("penstock_stage_seconds", "Seconds by stage.", labels=["loader", "stage"])
        loading = CounterMetricFamily(
            "penstock_loading_seconds", "Seconds in which a loop waited for its data.", labels=["loader"]
        )
        slots = GaugeMetricFamily("penstock_slots", "Slots by state.", labels=["loader", "state"])
        memory = GaugeMetricFamily("penstock_slots_bytes", "Host memory of slots.", labels=["loader"])
        for loader, now in counters:
            for stage in _STAGES:
                stages.add_metric([loader, stage], getattr(now.stages, f"{stage}_s"))
            loading.add_metric([loader], now.loading_s)
            for state in _SLOTS:
                slots.add_metric([loader, state], getattr(now.ring, state))
            memory.add_metric([loader], now.ring.nbytes)
        yield from (stages, loading, slots, memory)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each client in its own thread, so that a slow one delays neither other clients nor the program's exit."""

    daemon_threads = True
    block_on_close = False


class _Silent(WSGIRequestHandler):
    """Answers without logging to stderr, which belongs to the program."""

    timeout = 5.0  # seconds without a byte from the client

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as exc:
        raise OptionError(
            f'--prometheus needs the package prometheus_client ({exc}); install it: pip install "penstock[prometheus]"'
        ) from exc
    return prometheus_client
