"""Which actors a pool has: requests to Ray, the numbers that they get, and their departure.

    requested ──(Ray has found room)──▶ numbered ──(its dataset is open)──▶ open ──▶ leaving
                                           └────────── its process or its machine dies ──▶ removed

The lowest vacant number goes to the actor that arrives first: with room for five of 64 actors, workers 0 to 4 are
there, and the other requests wait in Ray's queue, which is what Ray's autoscaler acts on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from penstock.cluster.actor import RayWorker
from penstock.cluster.connection import Cluster
from penstock.cluster.remote_actor import RemoteActor

CORE_WAIT_S = 20.0
"""How long a worker for which tasks wait may wait for its own core; then it shares another worker's."""

_WARN_S = 30.0
"""How long no worker at all may arrive before a warning."""


class Placement:
    """The actors of one pool, by what has become of them.

    Args:
        cluster: where they run.
        spec_ref: Ray's reference to what they are started with.
    """

    def __init__(self, cluster: Cluster, spec_ref: Any) -> None:
        self.members: list[RemoteActor | None] = []
        """By worker number; None where the number is vacant."""
        self.requested: list[RemoteActor] = []
        self.leaving: list[RemoteActor] = []
        self._cluster = cluster
        self._ray = cluster.ray
        self._spec_ref = spec_ref
        self._has_warned = False

    def everybody(self) -> list[RemoteActor]:
        """Return all actors that have a number, and those that are leaving."""
        return [*(actor for actor in self.members if actor is not None), *self.leaving]

    def resize(self, workers: int) -> None:
        """Request actors, or retire the last ones, until there are `workers`."""
        while len(self.members) > workers:
            actor = self.members.pop()
            if actor is not None:
                actor.is_retired = True
                self.leaving.append(actor)
        self.dismiss_idle()
        self.members += [None] * (workers - len(self.members))
        self.request_missing()

    def dismiss_idle(self) -> None:
        """End the retired actors that have no task left."""
        for actor in [actor for actor in self.leaving if not actor.tasks]:
            self.leaving.remove(actor)
            actor.handle.leave.remote()

    def request_missing(self) -> None:
        """Have as many actors requested as there are vacant numbers."""
        vacant = len(self._vacant())
        while len(self.requested) > vacant:
            self._ray.kill(self.requested.pop().handle)
        for _ in range(len(self.requested), vacant):
            self.requested.append(self._request(num_cpus=1, scheduling_strategy="SPREAD"))

    def take_number(self, actor: RemoteActor) -> int:
        """Take an actor that has arrived off the requests, and give it the lowest vacant number."""
        self.requested.remove(actor)
        actor.number = self._vacant()[0]
        return actor.number

    def seat(self, actor: RemoteActor) -> None:
        """Make a numbered actor a member."""
        assert actor.number is not None
        self.members[actor.number] = actor
        self.request_missing()

    def remove(self, actor: RemoteActor) -> None:
        """Remove an actor that has died."""
        assert actor.number is not None
        if actor.is_retired:
            self.leaving.remove(actor)
        elif self.members[actor.number] is actor:
            self.members[actor.number] = None

    def relieve_shortage(self, has_tasks: Callable[[int], bool]) -> None:
        """Where tasks have waited long for a worker that finds no core, request one that shares another's core.

        Args:
            has_tasks: whether tasks wait for the worker of this number.
        """
        now = time.monotonic()
        awaited = [number for number in self._vacant() if has_tasks(number)]
        overdue = [actor for actor in self.requested if now - actor.requested_s > CORE_WAIT_S and not actor.shares_core]
        sharing = sum(actor.shares_core for actor in self.requested)
        hosts = [actor.arrival for actor in self.members if actor is not None and actor.arrival is not None]
        for number in awaited[sharing : len(overdue)] if hosts else ():
            beside = self._cluster.affinity(hosts[number % len(hosts)].machine, only=False)
            self.requested.insert(0, self._request(num_cpus=0, scheduling_strategy=beside))
            self.requested[0].shares_core = True
        if not hosts and not self._has_warned and any(now - actor.requested_s > _WARN_S for actor in self.requested):
            self._has_warned = True
            total, free = self._cluster.cpus()
            warnings.warn(
                f"no Ray worker has started for {_WARN_S:g} s: each takes 1 CPU, and the cluster has {total:g}, "
                f"{free:g} of them free. If others occupy them, add machines (`ray start --address=...`); if not, its "
                "machines are slow to start a Python process that imports torch, and the loader waits for them (Ray "
                "runs workers at nice 15, behind all other programs; RAY_worker_niceness=0 for `ray start` changes it)",
                stacklevel=2,
            )

    def _vacant(self) -> list[int]:
        return [number for number, actor in enumerate(self.members) if actor is None]

    def _request(self, **where: Any) -> RemoteActor:
        remote = self._ray.remote(RayWorker).options(max_restarts=0, max_task_retries=0, **where)
        handle = remote.remote([self._spec_ref])
        machines = frozenset(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
        return RemoteActor(handle, time.monotonic(), machines, handle.arrive.remote())
