"""The Ray cluster that this process is connected to: the only file that imports ray in the training process.

Whoever connected, disconnects: a connection that the program made itself (`ray.init`) is used and left alone; one that
was made here ends with the last loader that uses it.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.core.errors import TransportError
from penstock.feed.sources.extras import need

KNOCK_S = 10.0
"""How long whoever listens at a cluster's address may take to answer."""


class Cluster:
    """A share in this process's connection. `leave` ends it; the connection ends with the last share, if it is ours.

    Args:
        address: "ray://host:port" of a cluster's client server; None for the cluster that this machine is part of
            (RAY_ADDRESS, or the one that `ray start` has started here). None is started: a machine alone is better
            served by worker processes.

    Raises:
        ExtraError: ray is not installed.
        TransportError: there is no cluster, or nothing answers at its address.
    """

    _lock = threading.RLock()  # a finalizer may let go of one share while another is taken
    _ours: ClassVar[set[Cluster]] = set()
    """The shares in a connection that was made here."""

    def __init__(self, address: str | None) -> None:
        self.ray = need("ray", "ray")
        with Cluster._lock:
            if not self.ray.is_initialized():
                self._connect(address)
                Cluster._ours = {self}
            elif Cluster._ours:
                Cluster._ours.add(self)
            self._connection = self._current()

    def _current(self) -> str:
        """Return what tells this process's connection from an earlier or a later one."""
        return str(self.ray.get_runtime_context().get_job_id())

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's future way with devices, and what it warns about: an actor without a GPU is left its environment.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _knock(wanted)
            self.ray.init(address=wanted, logging_level="warning")
        except OSError as error:
            where = "on this machine, nor in RAY_ADDRESS" if wanted == "auto" else f"at {wanted}"
            raise TransportError(
                f"no Ray cluster is to be found {where} ({error}); start one (`ray start --head` here, and `ray start "
                "--address=...` on the machines that are to work for it), or correct the address"
            ) from error

    @property
    def is_there(self) -> bool:
        """Whether the connection still stands: the program may have ended it, or be about to end itself."""
        return bool(self.ray.is_initialized()) and self._current() == self._connection

    def require(self) -> None:
        """Raise a TransportError if the connection has ended; without this, Ray's functions would make a new one."""
        if not self.is_there:
            raise TransportError(
                "the connection to Ray that this loader's workers came with has ended (ray.shutdown); let it stand "
                "until the loader is done, or make a new loader"
            )

    def has_machine(self, machine: str) -> bool:
        """Return whether the cluster counts the node with this id among the living."""
        return any(node["NodeID"] == machine and node["Alive"] for node in self.ray.nodes())

    def room(self) -> tuple[float, float]:
        """Return how many CPUs the cluster has, and how many of them are free."""
        return self.ray.cluster_resources().get("CPU", 0.0), self.ray.available_resources().get("CPU", 0.0)

    def on(self, machine: str, *, only: bool) -> Any:
        """Return the scheduling strategy that places something on one machine (or near it, without `only`)."""
        strategies = need("ray.util.scheduling_strategies", "ray")
        return strategies.NodeAffinitySchedulingStrategy(machine, soft=not only)

    def leave(self) -> None:
        """Give up this share."""
        with Cluster._lock:
            if self in Cluster._ours:
                Cluster._ours.remove(self)
                if not Cluster._ours and self.is_there:
                    self.ray.shutdown()


def _knock(address: str) -> None:
    """Raise an OSError if nothing listens at an address: Ray itself would try for minutes."""
    where = urlsplit(address if "://" in address else f"//{address}")
    if where.hostname and where.port:
        socket.create_connection((where.hostname, where.port), timeout=KNOCK_S).close()
