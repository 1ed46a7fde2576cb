"""Ray workers without a cluster: arguments that are refused, and errors for what is missing."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
from sample_sets import Numbered

import penstock
from penstock import DataLoader, ExtraError, OptionError, TransportError
from penstock.cluster.post_mortem import describe_cause
from penstock.cluster.remote_actor import RemoteActor


def test_a_missing_ray_is_named_with_its_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExtraError, match=r"penstock\[ray\]"):
        iter(DataLoader(Numbered(4), num_workers=1, worker_type="ray"))
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(ExtraError, match=r"penstock\[ray\]"):
        penstock.ray_dataset(None)


def test_without_a_cluster_there_is_an_error_that_says_how_to_start_one(monkeypatch) -> None:
    def init(**arguments: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(TransportError, match="ray start --head"):
        iter(DataLoader(Numbered(4), num_workers=1, worker_type="ray"))


def test_an_address_where_nobody_listens_is_an_error_at_once(monkeypatch) -> None:
    def init(**arguments: object) -> None:
        raise AssertionError("Ray would try for minutes")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        monkeypatch.setenv(name, "0")
    with socket.socket() as nobody:  # bound, so that nobody else listens there, either
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"ray://{address}"):
            iter(DataLoader(Numbered(4), num_workers=1, worker_type=f"ray://{address}"))
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(TransportError, match=f"at {address}"):
            iter(DataLoader(Numbered(4), num_workers=1, worker_type="ray"))


def test_the_reason_why_a_worker_could_not_be_set_up_is_reported() -> None:
    words = "The actor died because of an error raised in its creation task, ray::RayWorker.__init__()\n"
    error = RuntimeError(f"{words}ModuleNotFoundError: No module named 'penstock'")
    cause = describe_cause(error, RemoteActor(None, 0.0, frozenset(), None))
    assert "No module named 'penstock'" in cause


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"worker_type": "ray", "num_workers": "auto"}, r"num_workers=\(least, most\)"),
        ({"worker_type": "ray", "num_workers": (3, 2)}, "0 <= least <= most"),
        ({"worker_type": "process", "num_workers": (1, 2)}, "worker_type='ray'"),
        ({"worker_type": "rays"}, "'ray://host:port'"),
    ],
)
def test_the_error_for_a_bad_argument_names_a_good_one(arguments, words) -> None:
    with pytest.raises(OptionError, match=words):
        DataLoader(Numbered(4), **arguments)


def test_more_workers_than_this_machine_has_cores_are_no_reason_to_warn(recwarn) -> None:
    DataLoader(Numbered(4), num_workers=500, worker_type="ray")
    assert not recwarn
