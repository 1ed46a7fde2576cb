"""The Ray cluster that this process is connected to: the only file that imports ray in the training process.

A connection that the program made itself (`ray.init`) is used and left open. One that was made here ends with the last
loader that uses it.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, ClassVar
from urllib.parse import urlsplit

from penstock.core.errors import TransportError
from penstock.data.optional import need

CONNECT_TIMEOUT_S = 10.0
"""How long a cluster's address may take to accept a connection."""


class Cluster:
    """A share in this process's connection. `leave` ends the share; a connection made here ends with its last share.

    Args:
        address: "ray://host:port" of a cluster's client server; None for the cluster that this machine is part of
            (RAY_ADDRESS, or the one that `ray start` has started here). No cluster is started: on a single machine,
            worker processes are better.

    Raises:
        ExtraError: ray is not installed.
        TransportError: there is no cluster, or nothing answers at its address.
    """

    _lock = threading.RLock()  # a finalizer may end one share while another begins
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
        """Return an id of this process's connection, which an earlier or a later one does not have."""
        return str(self.ray.get_runtime_context().get_job_id())

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's future default, about which it warns: the environment of an actor without a GPU stays as it is.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _check_reachable(wanted)
            self.ray.init(address=wanted, logging_level="warning")
        except OSError as error:
            where = "on this machine, nor in RAY_ADDRESS" if wanted == "auto" else f"at {wanted}"
            raise TransportError(
                f"no Ray cluster was found {where} ({error}); start one (`ray start --head` here, and `ray start "
                "--address=...` on the machines that should work for it), or correct the address"
            ) from error

    @property
    def is_there(self) -> bool:
        """Whether the connection is still open: the program may have ended it, or be about to end itself."""
        return bool(self.ray.is_initialized()) and self._current() == self._connection

    def require(self) -> None:
        """Raise a TransportError if the connection has ended; without this, Ray's functions would open a new one."""
        if not self.is_there:
            raise TransportError(
                "the connection to Ray that this loader's workers use has ended (ray.shutdown); keep it open until the "
                "loader is done, or make a new loader"
            )

    def has_machine(self, machine: str) -> bool:
        """Return whether the node with this id is alive, as far as the cluster knows."""
        return any(node["NodeID"] == machine and node["Alive"] for node in self.ray.nodes())

    def cpus(self) -> tuple[float, float]:
        """Return how many CPUs the cluster has, and how many of them are free."""
        return self.ray.cluster_resources().get("CPU", 0.0), self.ray.available_resources().get("CPU", 0.0)

    def affinity(self, machine: str, *, only: bool) -> Any:
        """Return the scheduling strategy that places something on one machine (or near it, without `only`)."""
        strategies = need("ray.util.scheduling_strategies", "ray")
        return strategies.NodeAffinitySchedulingStrategy(machine, soft=not only)

    def leave(self) -> None:
        """End this share."""
        with Cluster._lock:
            if self in Cluster._ours:
                Cluster._ours.remove(self)
                if not Cluster._ours and self.is_there:
                    self.ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise an OSError if nothing listens at an address, because Ray itself would try for minutes."""
    where = urlsplit(address if "://" in address else f"//{address}")
    if where.hostname and where.port:
        socket.create_connection((where.hostname, where.port), timeout=CONNECT_TIMEOUT_S).close()
