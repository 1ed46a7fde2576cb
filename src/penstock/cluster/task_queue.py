"""Tasks on their way to Ray actors and back.

A task comes back as two objects: a small result, which means that the worker is free again, and the batch's bytes,
which Ray brings to this machine meanwhile. They are copied once, into the slot. An actor's results are collected in
the order of its tasks, so that what a dead one has delivered is the beginning of what it was given.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.cluster.remote_actor import RemoteActor, RemoteTask
from penstock.core.shared_segment import PAGE, PrivateSegment
from penstock.core.units import round_up
from penstock.loader.workers.messages import Result, Task

_SHORT_NS = 100_000_000
"""While tasks take less, a worker has a second one waiting, so that it does not wait for the network."""


class TaskQueue:
    """The tasks of one pool: those that wait, and those that actors have (`RemoteActor.tasks`).

    Args:
        ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self.outstanding: dict[int, Task] = {}
        """Tasks that were submitted and have not been collected."""
        self._ray = ray
        self._shared: deque[Task] = deque()
        self._own: dict[int, deque[Task]] = {}
        """Tasks for one worker only, by its number."""
        self._typical_ns: float | None = None

    def add(self, task: Task) -> None:
        """Queue a task."""
        self.outstanding[task.seq] = task
        if task.worker is None:
            self._shared.append(task)
        else:
            self._own.setdefault(task.worker, deque()).append(task)

    def has_tasks_for(self, worker: int) -> bool:
        """Return whether tasks for this worker only are waiting."""
        return bool(self._own.get(worker))

    def take_own(self, worker: int) -> Sequence[Task]:
        """Take back the tasks that wait for this worker only."""
        return self._own.pop(worker, ())

    def forget(self, tasks: Sequence[Task]) -> None:
        """Drop tasks that died with their worker."""
        for task in tasks:
            del self.outstanding[task.seq]

    def cancel(self, *, finish: bool) -> list[Task]:
        """Cancel all tasks; return those that no worker will get: with `finish`, not those for one worker only."""
        untaken = [*self._shared]
        self._shared.clear()
        if not finish:
            untaken += [task for own in self._own.values() for task in own]
            self._own.clear()
        self.forget(untaken)
        for task in self.outstanding.values():
            task.cancelled = True
        return untaken

    def send(self, members: Sequence[RemoteActor | None]) -> None:
        """Send waiting tasks to the actors that can take them, first to those that have none."""
        depth = 2 if self._typical_ns is not None and self._typical_ns < _SHORT_NS else 1
        free: list[tuple[int, int, RemoteActor]] = []
        for number, actor in enumerate(members):
            if actor is None or not actor.is_open:
                continue
            unfinished = actor.unfinished()
            own = self._own.get(number)
            while own and unfinished < depth:
                self._send_to(actor, own.popleft())
                unfinished += 1
            free += [(taken, number, actor) for taken in range(unfinished, depth)]
        for _, _, actor in sorted(free, key=lambda entry: entry[:2]):
            if not self._shared:
                return
            self._send_to(actor, self._shared.popleft())

    def _send_to(self, actor: RemoteActor, task: Task) -> None:
        order = Task(task.seq, task.number, task.indices, epoch_seed=task.epoch_seed)  # without what is this process's
        order.shard, order.wants_state = task.shard, task.wants_state
        result_ref, data_ref = actor.handle.make.options(num_returns=2).remote(order)
        actor.tasks.append(RemoteTask(task, result_ref, data_ref))

    # ── collecting ──────────────────────────────────────────────────────────────────────────────────────────

    def awaited(self, actor: RemoteActor) -> list[Any]:
        """Return the references that an actor's tasks wait for."""
        unfinished = [remote.result_ref for remote in actor.tasks if remote.result is None]
        return unfinished + [
            remote.data_ref for remote in actor.tasks if remote.result is not None and not remote.has_data
        ]

    def collect(self, actor: RemoteActor, ready: set[Any], results: list[Result]) -> None:
        """Append the results of an actor that are complete, given the references that are ready.

        Raises:
            RayError: the actor has died; `results` has what was complete before.
        """
        for remote in actor.tasks:
            if remote.result is None and remote.result_ref in ready:
                remote.result = self._get_result(actor, remote)
                remote.has_data = remote.result.envelope is None or remote.result.nbytes == 0
            elif remote.result is not None and not remote.has_data:
                remote.has_data = remote.data_ref in ready
        while actor.tasks and actor.tasks[0].has_data:
            results.append(self._copy_data(actor.tasks[0]))
            actor.tasks.popleft()

    def _get_result(self, actor: RemoteActor, remote: RemoteTask) -> Result:
        try:
            result: Result = self._ray.get(remote.result_ref)
        except self._ray.exceptions.RayTaskError:  # not raised by the dataset: its errors come in the result
            assert actor.number is not None
            error = ExceptionWrapper(where=f"in DataLoader worker process {actor.number}")
            return Result(remote.task.seq, actor.number, error=error)
        result.state = pickle.loads(result.state) if result.state else None
        result.began_ns = time.perf_counter_ns() - result.fetch_ns - result.collate_ns
        took = result.busy_ns = result.fetch_ns + result.collate_ns
        self._typical_ns = took if self._typical_ns is None else 0.8 * self._typical_ns + 0.2 * took
        return result

    def _copy_data(self, remote: RemoteTask) -> Result:
        """Return the result of a task whose data is here, with the data in its slot or, if larger, a new segment."""
        result, task = remote.result, remote.task
        assert result is not None
        if result.nbytes and result.envelope is not None and not task.cancelled:
            data = self._ray.get(remote.data_ref)
            if data is not None:
                memory = task.slot.memory if task.slot is not None else memoryview(b"")
                if data.nbytes > len(memory):
                    result.oversize = PrivateSegment(round_up(data.nbytes, PAGE))
                    memory = result.oversize.memory
                np.frombuffer(memory, np.uint8)[: data.nbytes] = data
        result.task = self.outstanding.pop(result.seq)
        return result
