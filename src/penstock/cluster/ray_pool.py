"""A pool of Ray actors: workers on the machines of a Ray cluster, placed and kept alive by Ray.

`Placement` knows which actors there are, `TaskQueue` what each of them makes, and `PostMortems` why one died. The pool
waits for whatever happens next, and passes it on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.cluster.connection import Cluster
from penstock.cluster.placement import Placement
from penstock.cluster.post_mortem import PostMortems
from penstock.cluster.remote_actor import RemoteActor
from penstock.cluster.task_queue import TaskQueue
from penstock.core.errors import UnpicklableError
from penstock.core.shared_segment import SharedSegment
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.pool import PoolSnapshot, WorkerCrash
from penstock.loader.workers.stream_shard import StreamShard, shards_of_worker
from penstock.loader.workers.worker import WorkerOptions
from penstock.loader.workers.worker_spec import WorkerSpec

_LEAVE_S = 5.0
"""How long a worker may take to finish its sample when the pool closes; as torch's DataLoader waits."""

_CHECK_S = 1.0
"""How often requests and post mortems are checked for having taken too long."""


class RayPool:
    """Ray actors of one loader; see `Pool` for the protocol.

    Args:
        worker_spec: what they do; it is put into Ray's object store once.
        workers: how many there should be, each with one CPU.
        cluster: where; the pool leaves it when it closes.
        reported_workers: what `get_worker_info().num_workers` returns.
        base_seed: worker k's random states begin with base_seed + k, as torch's.

    Raises:
        UnpicklableError: the spec cannot travel.
        TransportError: later, when the program has ended the connection to Ray.
    """

    def __init__(
        self,
        worker_spec: WorkerSpec,
        workers: int,
        *,
        cluster: Cluster,
        reported_workers: int,
        base_seed: int,
    ) -> None:
        self.size = workers
        self.processes: list[Any] = []
        self._cluster = cluster
        self._ray = cluster.ray
        self._options = WorkerOptions(worker=0, workers=reported_workers, base_seed=base_seed)
        self._shards: Sequence[StreamShard] = ()
        """Of an iterable dataset, as a worker that arrives now has to begin them."""
        self._owner = os.getpid()
        self._closed = False
        try:
            spec_ref = self._ray.put(worker_spec)
        except Exception as error:
            cluster.leave()
            raise UnpicklableError(
                f"the dataset, collate_fn, errors= or worker_init_fn cannot travel to other machines: "
                f"{_root_cause(error)}; leave out what belongs to this process (open files, locks, generators), or "
                "open it in worker_init_fn"
            ) from error
        self._placement = Placement(cluster, spec_ref)
        self._tasks = TaskQueue(self._ray)
        self._post_mortems = PostMortems(cluster)

    # ── membership ──────────────────────────────────────────────────────────────────────────────────────────

    def start(self, shards: Sequence[StreamShard]) -> None:
        """Request the actors from Ray; they arrive when there is room."""
        self._shards = [*shards]
        self.resize(self.size)

    def resize(self, workers: int) -> bool:
        """Request actors or retire some, until there are `workers`; a retired one finishes its tasks first."""
        self.size = workers
        self._placement.resize(workers)
        return True

    def replace(self, worker: int, shards: Sequence[StreamShard]) -> None:
        """Request a successor for a dead worker."""
        self._shards = [*shards]
        self._placement.request_missing()

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker has found room and opened its dataset."""
        actor = self._placement.members[worker]
        return actor is not None and actor.is_open

    def _on_arrival(self, actor: RemoteActor) -> list[Result | WorkerCrash]:
        number = self._placement.take_number(actor)
        try:
            actor.arrival = self._ray.get(actor.arriving)
        except self._ray.exceptions.RayError as error:
            return self._reap(actor, error)
        self._placement.seat(actor)
        shards = shards_of_worker(self._shards, number, self.size)
        actor.opening = actor.handle.open.remote(replace(self._options, worker=number, shards=shards))
        return []

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────

    def has_effects(self) -> bool:
        """Return False: nobody looks for them."""
        return False

    def outstanding(self) -> int:
        """Return how many tasks were submitted and have not been collected."""
        return len(self._tasks.outstanding)

    def announce(self, number: int, segment: SharedSegment | None) -> None:
        """Do nothing: slots are filled by this process."""

    def submit(self, task: Task) -> None:
        """Queue a task; never blocks."""
        self._cluster.require()
        self._tasks.add(task)
        self._tasks.send(self._placement.members)

    def current_task(self, worker: int) -> tuple[Task | None, int]:
        """Return the task that a worker makes; its row is known on its machine only."""
        actor = self._placement.members[worker]
        if actor is None:
            return None, 0
        return next((remote.task for remote in actor.tasks if remote.result is None), None), 0

    def cancel(self, shards: Sequence[StreamShard], *, finish: bool) -> list[Task]:
        """Cancel all tasks and begin a new epoch with these shards; return the tasks that no worker had taken.

        A worker finishes the tasks that it has, two at most: calls under `ray.cancel` have been seen never to return.
        With `finish` it makes all that are meant for it, except those of a stream, whose new epoch begins at once.
        """
        self._cluster.require()
        self._shards = [*shards]
        untaken = self._tasks.cancel(finish=finish and not self._shards)
        for actor in self._placement.everybody():
            own = shards_of_worker(self._shards, actor.number, self.size) if actor.number is not None else {}
            actor.handle.begin_epoch.remote(own)
        return untaken

    def snapshot(self) -> PoolSnapshot:
        """Return what the actors do just now; see `Pool.snapshot`."""
        members = list(self._placement.members)
        present = [actor for actor in members if actor is not None and actor.is_open]
        finished = {
            remote.task
            for actor in present
            for remote in list(actor.tasks)
            if remote.result is not None and not remote.task.cancelled
        }
        working = sum(any(remote.result is None for remote in list(actor.tasks)) for actor in present)
        return PoolSnapshot(finished, working=working, starting=len(members) - len(present))

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, timeout_s: float | None) -> list[Result | WorkerCrash]:
        """Wait until something happens, at most `timeout_s` seconds, and return everything that has happened."""
        self._cluster.require()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._handle(self._wait(remaining))
            self._placement.relieve_shortage(self._tasks.has_tasks_for)
            self._placement.dismiss_idle()
            self._tasks.send(self._placement.members)
            if events or (remaining is not None and remaining <= 0):
                return events

    def _wait(self, timeout_s: float | None) -> set[Any]:
        """Return the references that are ready; waits for the first one, at most so long or `_CHECK_S`."""
        awaited = [actor.arriving for actor in self._placement.requested]
        awaited += self._post_mortems.awaited()
        for actor in self._placement.everybody():
            if actor.opening is not None:
                awaited.append(actor.opening)
            awaited += self._tasks.awaited(actor)
        if not awaited:
            return set()
        must_check = self._placement.requested or self._post_mortems.is_pending
        if must_check and (timeout_s is None or timeout_s > _CHECK_S):
            timeout_s = _CHECK_S
        ready, rest = self._ray.wait(awaited, num_returns=1, timeout=timeout_s)
        if ready and rest:
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        return set(ready)

    def _handle(self, ready: set[Any]) -> list[Result | WorkerCrash]:
        events: list[Result | WorkerCrash] = []
        for actor in [actor for actor in self._placement.requested if actor.arriving in ready]:
            if actor in self._placement.requested:  # an earlier one may have taken the last vacant number
                events += self._on_arrival(actor)
        for actor in self._placement.everybody():
            events += self._collect_from(actor, ready)
        for crash in self._post_mortems.conclude(ready):
            self._tasks.forget(crash.lost)
            events.append(crash)
        return events

    def _collect_from(self, actor: RemoteActor, ready: set[Any]) -> list[Result | WorkerCrash]:
        results: list[Result] = []
        try:
            if actor.opening in ready:
                self._ray.get(actor.opening)
                actor.opening, actor.is_open = None, True
            self._tasks.collect(actor, ready, results)
        except self._ray.exceptions.RayError as error:
            return [*results, *self._reap(actor, error)]
        return [*results]

    def _reap(self, actor: RemoteActor, error: Exception) -> list[Result | WorkerCrash]:
        """Find out what an actor had that cannot be reached any more, and have its death examined."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor.handle)  # one that only seemed to be gone must not come back
        lost = [remote.task for remote in actor.tasks]
        actor.tasks.clear()
        self._placement.remove(actor)
        if not actor.is_retired:
            assert actor.number is not None
            lost += self._tasks.take_own(actor.number)
        elif not lost:
            return []
        crashes = self._post_mortems.examine(actor, error, lost)
        for crash in crashes:
            self._tasks.forget(crash.lost)
        return [*crashes]

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Have the actors leave, and wait for them; those that do not leave in time are killed."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if not self._cluster.is_there:  # the program has shut Ray down, and the actors with it
            self._cluster.leave()
            return
        everybody = self._placement.everybody()
        try:
            leaving = [actor.handle.leave.remote() for actor in everybody]
            if leaving:
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
            for actor in (*everybody, *self._placement.requested):
                self._ray.kill(actor.handle)
        finally:
            self._cluster.leave()


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that Ray's one came from: Ray's text for it fills a screen."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
