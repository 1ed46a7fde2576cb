"""The Ray cluster that this process is connected to: the only file that imports ray in the training process.

Whoever connected, disconnects: a connection that the program made itself (`ray.init`) is used and left alone; one that
was made here ends with the last loader that uses it.
"""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar

from penstock.core.errors import TransportError
from penstock.feed.sources.extras import need


class Cluster:
    """A share in this process's connection. `leave` ends it; the connection ends with the last share, if it is ours.

    Args:
        address: "ray://host:port" of a cluster's client server; None for the cluster that this machine is part of
            (RAY_ADDRESS, or the one that `ray start` has started here). None is started: a machine alone is better
            served by worker processes.

    Raises:
        ExtraError: ray is not installed.
        TransportError: there is no cluster.
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

    def _connect(self, address: str | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's future way with devices, and what it warns about: an actor without a GPU is left its environment.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            self.ray.init(address=wanted, logging_level="warning")
        except ConnectionError as error:
            where = "on this machine, nor in RAY_ADDRESS" if wanted == "auto" else f"at {wanted}"
            raise TransportError(
                f"no Ray cluster is to be found {where} ({error}); start one (`ray start --head` here, and `ray start "
                "--address=...` on the machines that are to work for it), or correct the address"
            ) from error

    @property
    def is_there(self) -> bool:
        """Whether the connection still stands: the program may have ended it, or be about to end itself."""
        return bool(self.ray.is_initialized())

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
                if not Cluster._ours:
                    self.ray.shutdown()
