"""The endpoint serves what the loaders have counted, in a form that Prometheus' own parser reads."""

from __future__ import annotations

import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sample_sets import Numbered

from penstock import DataLoader
from penstock.core.errors import OptionError
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.live.prometheus import Endpoint


@pytest.fixture
def registry() -> LoaderRegistry:
    return LoaderRegistry()


def _read(endpoint: Endpoint) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_the_numbers_are_the_loaders_own_while_it_is_iterated(registry: LoaderRegistry) -> None:
    endpoint = Endpoint(registry, 0)
    try:
        endpoint.start()
        assert _read(endpoint) == {}
        loader, other = (DataLoader(Numbered(40), batch_size=4) for _ in range(2))
        registry.register(loader)
        registry.register(other)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        got, now = _read(endpoint), loader.statistics()
        (name,) = {one for _, one, *_ in got}  # the other loader is not iterated
        assert name.startswith("Numbered (test_prometheus.py:")
        assert got["penstock_batches_total", name] == 3
        assert got["penstock_samples_total", name] == 12
        assert got["penstock_stage_seconds_total", name, "fetch"] == now.stages.fetch_s
        assert got["penstock_slots", name, "held"] == now.ring.held
    finally:
        endpoint.close()


def test_a_silent_client_delays_neither_other_clients_nor_the_end(registry: LoaderRegistry) -> None:
    endpoint = Endpoint(registry, 0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as silent:
        endpoint.start()
        registry.register(DataLoader(Numbered(4)))
        assert _read(endpoint) == {}
        endpoint.close()
        silent.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            silent.recv(1)  # it was still being waited for


def test_a_port_that_is_taken_is_named_at_once(registry: LoaderRegistry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OptionError, match=rf"port {port} of 127.0.0.1 cannot be opened .*; give another --prometheus"
        ):
            Endpoint(registry, port)


def test_a_number_that_is_no_port_is_refused(registry: LoaderRegistry) -> None:
    with pytest.raises(OptionError, match="port 70000"):
        Endpoint(registry, 70000)


def test_without_prometheus_client_the_error_names_the_extra(
    registry: LoaderRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match=r'pip install "penstock\[prometheus\]"'):
        Endpoint(registry, 0)


def test_the_endpoint_listens_on_this_machine_only(registry: LoaderRegistry) -> None:
    endpoint = Endpoint(registry, 0)
    try:
        assert endpoint._server.server_address[0] == "127.0.0.1"
    finally:
        endpoint.close()
