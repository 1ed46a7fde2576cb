"""A running program's numbers for Prometheus. The one file that imports prometheus_client
(`pip install "penstock[prometheus]"`).

The loaders are asked when somebody asks for the numbers, in threads of the endpoint's own; nothing is ever pushed, and
the program waits for none of it. The endpoint listens on this machine only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from penstock.core.errors import OptionError
from penstock.observe import rates
from penstock.observe.watch import Watch

_HOST = "127.0.0.1"

_COUNTERS = (
    ("penstock_batches", "Batches handed out.", "batches"),
    ("penstock_samples", "Samples in those.", "samples"),
    ("penstock_bytes", "Bytes of those.", "nbytes"),
    ("penstock_epochs", "Epochs that have ended.", "epochs"),
    ("penstock_worker_restarts", "Workers that died and were replaced.", "restarts"),
    ("penstock_samples_skipped", "Samples left out or replaced.", "skipped"),
)
_STAGES = ("fetch", "collate", "transport", "wait", "step")
_SLOTS = ("free", "filling", "ready", "held", "copying")


class Endpoint:
    """Serves the numbers of the loaders of `watch` at http://127.0.0.1:`port`/metrics.

    The port is taken when the object is made, so that one in use is known at once; requests are answered after
    `start`. Order: make, `start` (more than once does nothing), `close`.

    Args:
        watch: the loaders.
        port: where to listen; 0 for any free one (see `port`).

    Raises:
        OptionError: prometheus_client is not installed, or the port is taken.
    """

    def __init__(self, watch: Watch, port: int) -> None:
        client = _client()
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(watch))
        try:
            self._server = make_server(_HOST, port, client.make_wsgi_app(registry), _Server, _Silent)
        except (OSError, OverflowError) as exc:
            raise OptionError(f"port {port} of {_HOST} cannot be had ({exc}); give another --prometheus PORT") from exc
        self.port = int(self._server.server_port)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from now on."""
        if self._thread is None:
            thread = threading.Thread(target=self._server.serve_forever, name="penstock-prometheus", daemon=True)
            with contextlib.suppress(RuntimeError):  # Python starts no thread when its main one has ended
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Answer no more and give the port back."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()


class _Collector:
    """Reads the loaders when it is asked; see prometheus_client's custom collectors."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def describe(self) -> list[Any]:
        """Return nothing: names are known when there is something to tell."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield one family of metrics after the other, each with a sample per loader."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = [(watched.name, watched.statistics()) for watched in list(self._watch.loaders)]
        for name, words, field in _COUNTERS:
            family = CounterMetricFamily(name, words, labels=["loader"])
            for loader, now in seen:
                family.add_metric([loader], getattr(now, field))
            yield family
        stages = CounterMetricFamily("penstock_stage_seconds", "Seconds by stage.", labels=["loader", "stage"])
        loading = CounterMetricFamily(
            "penstock_loading_seconds", "Seconds in which a loop got its data, in place of its step.", labels=["loader"]
        )
        slots = GaugeMetricFamily("penstock_slots", "Slots by what they are at.", labels=["loader", "state"])
        memory = GaugeMetricFamily("penstock_slots_bytes", "Host memory of slots.", labels=["loader"])
        for loader, now in seen:
            for stage in _STAGES:
                stages.add_metric([loader, stage], getattr(now.stages, f"{stage}_s"))
            loading.add_metric([loader], rates.loading_s(now))
            for state in _SLOTS:
                slots.add_metric([loader, state], getattr(now.ring, state))
            memory.add_metric([loader], now.ring.nbytes)
        yield from (stages, loading, slots, memory)


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each client in a thread of its own, so that a slow one holds up neither others nor the program's end."""

    daemon_threads = True
    block_on_close = False


class _Silent(WSGIRequestHandler):
    """Answers without a line on stderr, which is the program's."""

    timeout = 5.0  # seconds that a client may say nothing

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as exc:
        raise OptionError(
            f'--prometheus needs the package prometheus_client ({exc}); install it: pip install "penstock[prometheus]"'
        ) from exc
    return prometheus_client
