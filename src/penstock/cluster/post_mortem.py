"""Why a Ray actor died, and which sample is at fault.

Ray's knowledge decides. If the actor has died and its machine is alive, that machine has reported the death, and the
note that the process left there (`crash_note`) names the sample it was making. If the machine is gone, or nothing is
known but that the actor cannot be reached, no sample is at fault.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from penstock.cluster import crash_note
from penstock.cluster.connection import Cluster
from penstock.cluster.remote_actor import RemoteActor
from penstock.loader.workers.messages import Task
from penstock.loader.workers.pool import WorkerCrash

_NOTE_WAIT_S = 60.0
"""How long it may take to read a dead worker's note, for which Ray starts a process on a machine that may be busy.
After that no sample is at fault. If the machine dies meanwhile, Ray reports it at once."""


@dataclass(slots=True, eq=False)
class _PostMortem:
    actor: RemoteActor
    cause: str
    lost: list[Task]
    reading: Any
    """The reference of the note's content."""
    deadline_s: float


class PostMortems:
    """Examines dead actors; reading a note takes time, so that a crash may be reported later than it happened."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ray = cluster.ray
        self._pending: list[_PostMortem] = []

    @property
    def is_pending(self) -> bool:
        """Whether a note is being read."""
        return bool(self._pending)

    def awaited(self) -> list[Any]:
        """Return the references of the notes that are being read."""
        return [pending.reading for pending in self._pending]

    def examine(self, actor: RemoteActor, error: Exception, lost: list[Task]) -> list[WorkerCrash]:
        """Return the crash of an actor that cannot be reached any more; none yet while its note is being read."""
        cause, arrival = describe_cause(error, actor), actor.arrival
        if self._is_machine_failure(actor, error):
            return [_crash(actor, cause, lost, is_machine_failure=True)]
        if arrival is None or not lost:
            return [_crash(actor, cause, lost)]
        reading = (
            self._ray.remote(crash_note.read_note)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=self._cluster.affinity(arrival.machine, only=True))
            .remote(arrival.note)
        )
        self._pending.append(_PostMortem(actor, cause, lost, reading, time.monotonic() + _NOTE_WAIT_S))
        return []

    def conclude(self, ready: set[Any]) -> list[WorkerCrash]:
        """Return the crashes whose note has been read, or is not waited for any longer."""
        now = time.monotonic()
        crashes = []
        for pending in [one for one in self._pending if one.reading in ready or now > one.deadline_s]:
            self._pending.remove(pending)
            crashes.append(self._conclude(pending, is_read=pending.reading in ready))
        return crashes

    def _conclude(self, pending: _PostMortem, *, is_read: bool) -> WorkerCrash:
        if is_read:
            try:
                seq, row = self._ray.get(pending.reading)
            except self._ray.exceptions.RayError:
                pass  # the machine died with the note
            else:
                at_fault = next((task for task in pending.lost if task.seq == seq), None)
                return _crash(pending.actor, pending.cause, pending.lost, task_at_fault=at_fault, row=row)
        return _crash(pending.actor, pending.cause, pending.lost, is_machine_failure=True)

    def _is_machine_failure(self, actor: RemoteActor, error: Exception) -> bool:
        """Return whether a death has nothing to do with what the actor did: its machine has gone, as far as is known.

        Of a process that died on a live machine Ray knows, because the machine reports it.
        """
        failures = self._ray.exceptions
        is_preempted = bool(getattr(error, "preempted", False))  # the machine was about to be taken away
        if not isinstance(error, failures.ActorDiedError | failures.OutOfMemoryError) or is_preempted:
            return True
        if actor.arrival is not None:
            return not self._cluster.has_machine(actor.arrival.machine)
        return not all(self._cluster.has_machine(machine) for machine in actor.machines)


def _crash(
    actor: RemoteActor,
    cause: str,
    lost: list[Task],
    *,
    task_at_fault: Task | None = None,
    row: int = 0,
    is_machine_failure: bool = False,
) -> WorkerCrash:
    assert actor.number is not None
    pid = actor.arrival.pid if actor.arrival is not None else 0
    return WorkerCrash(actor.number, pid, cause, lost, task_at_fault, row, actor.is_retired, is_machine_failure)


def describe_cause(error: Exception, actor: RemoteActor) -> str:
    """Return the cause of an actor's death as a clause, from Ray's error."""
    where = f"on machine {actor.arrival.address}" if actor.arrival is not None else "that had just found a machine"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("The actor")), lines[0] if lines else "")
    if actor.arrival is None and lines and lines[-1] != reason:  # it could not be set up: the last line has the reason
        reason = lines[-1]
    return f"{where} has gone ({reason[:300]})."
