"""A pool of Ray actors: workers on the machines of a Ray cluster, placed, kept alive and told of by Ray.

    coming ──(Ray has found room)──▶ seated ──(its dataset is open)──▶ at work ──▶ leaving
                                        └────────── its process or its machine has gone ──▶ a Death

A worker's number is given to whoever arrives first, the lowest vacant one: with room for five of 64, workers 0 to 4
are there, and the other actors wait in Ray's queue, which is what Ray's autoscaler goes by.

A piece comes back as two objects: a small report, which says that the worker is free again, and the batch's bytes,
which Ray brings to this machine meanwhile. They are copied once, into the slot. An actor's pieces are reported in
their order, so that what a dead one has delivered is the beginning of what it was given.

Who is to blame for a death is decided by what Ray knows. If the actor has died and its machine is alive, the machine
has told so, and the note that the process left there (`ray_note`) says which sample it was making. If the machine is
gone, or nothing is known but that the actor cannot be reached, no sample is to blame.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up
from penstock.feed.sources.stream import Stream
from penstock.feed.transport.slab import PAGE, PrivateSlab, Slab
from penstock.feed.workers import ray_actor, ray_note
from penstock.feed.workers.base import Death, Piece, Report
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.maker import Job
from penstock.feed.workers.ray_actor import Arrival
from penstock.feed.workers.ray_cluster import Cluster
from penstock.feed.workers.workshop import WorkerOptions

ROOM_S = 20.0
"""How long a worker for which batches wait may wait for a core of its own; then it is put beside another one."""

_WARN_S = 30.0
_INQUEST_S = 60.0
"""How long it may take to read a dead worker's note, for which Ray starts a process on a machine that may be busy; then
nobody is blamed. If the machine goes meanwhile, Ray says so at once."""

_LEAVE_S = 5.0
"""How long a worker may take to finish its sample when the pool closes; as torch's DataLoader waits."""

_SHORT_NS = 100_000_000
"""While pieces take less, a worker has a second one waiting, so that it does not wait for the network."""


@dataclass(slots=True, eq=False)
class _Errand:
    """A piece on its way: given to an actor, told of by it, its bytes here."""

    piece: Piece
    head: Any
    body: Any
    report: Report | None = None
    is_here: bool = False


@dataclass(slots=True, eq=False)
class _Actor:
    handle: Any
    since: float
    machines: frozenset[str]
    """Those alive when it was asked for; it is on one of them, or on a newer one."""
    arriving: Any
    shares_core: bool = False
    """Whether it was asked for without a core of its own, beside one that finds none; who comes first stays."""
    number: int | None = None
    arrival: Arrival | None = None
    opening: Any = None
    is_open: bool = False
    is_retired: bool = False
    errands: deque[_Errand] = field(default_factory=deque)

    def making(self) -> int:
        """Return how many pieces it has not told of."""
        return sum(errand.report is None for errand in self.errands)


@dataclass(slots=True, eq=False)
class _Inquest:
    """A dead actor whose note is being read."""

    actor: _Actor
    cause: str
    lost: list[Piece]
    reading: Any
    deadline: float


class RayPool:
    """Ray actors of one loader; see `base.Pool` for the protocol.

    Args:
        job: what they do; it is put into Ray's object store once.
        workers: how many there are to be, each with one CPU.
        cluster: where; the pool leaves it when it closes.
        told: what `get_worker_info().num_workers` says.
        base_seed: worker k's random states begin with base_seed + k, as torch's.
        init_fn: called in each worker with its number.
        watch: whether to look out for samples that can tell their worker.

    Raises:
        UnpicklableError: the job cannot travel.
        TransportError: later, the program has ended the connection to Ray.
    """

    def __init__(
        self,
        job: Job,
        workers: int,
        *,
        cluster: Cluster,
        told: int,
        base_seed: int,
        init_fn: Callable[[int], Any] | None,
        watch: bool,
    ) -> None:
        self.size = workers
        self.processes: list[Any] = []
        self._cluster = cluster
        self._ray = cluster.ray
        self._dataset = job.dataset
        self._options = WorkerOptions(worker=0, workers=told, base_seed=base_seed, init_fn=None, watch=watch)
        self._lanes: Sequence[Lane] = ()
        """Of an iterable dataset, as a worker that comes now is to begin them."""
        self._seats: list[_Actor | None] = []
        self._coming: list[_Actor] = []
        self._leaving: list[_Actor] = []
        self._queue: deque[Piece] = deque()
        self._own: dict[int, deque[Piece]] = {}
        """Pieces for one worker only, by its number."""
        self._outstanding: dict[int, Piece] = {}
        self._inquests: list[_Inquest] = []
        self._typical_ns: float | None = None
        self._has_warned = False
        self._owner = os.getpid()
        self._closed = False
        try:
            self._job = self._ray.put((job, init_fn))
        except Exception as error:
            cluster.leave()
            raise UnpicklableError(
                f"the dataset, collate_fn, errors= or worker_init_fn cannot travel to other machines: {_root(error)}; "
                "leave out what belongs to this process (open files, locks, generators), or open it in worker_init_fn"
            ) from error

    # ── starting and letting go ─────────────────────────────────────────────────────────────────────────────

    def start(self, lanes: Sequence[Lane]) -> None:
        """Ask Ray for the actors; they come when there is room."""
        self._lanes = [*lanes]
        self.resize(self.size)

    def resize(self, workers: int) -> bool:
        """Ask for actors or let some go, until there are `workers`; who goes finishes its pieces first."""
        self.size = workers
        while len(self._seats) > workers:
            actor = self._seats.pop()
            if actor is not None:
                self._retire(actor)
        self._seats += [None] * (workers - len(self._seats))
        self._fill_up()
        return True

    def replace(self, worker: int, lanes: Sequence[Lane]) -> None:
        """Ask for a successor of a dead worker."""
        self._lanes = [*lanes]
        self._fill_up()

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker has found room and opened its dataset."""
        actor = self._seats[worker]
        return actor is not None and actor.is_open

    def present(self) -> int:
        """Return how many workers are ready, from the first one on."""
        return next((number for number in range(self.size) if not self.is_ready(number)), self.size)

    def outstanding(self) -> int:
        """Return how many pieces are given out and have not come back."""
        return len(self._outstanding)

    def _share(self, worker: int) -> dict[int, Lane]:
        return {place: lane for place, lane in enumerate(self._lanes) if place % self.size == worker}

    def _vacant(self) -> list[int]:
        return [number for number, actor in enumerate(self._seats) if actor is None]

    def _fill_up(self) -> None:
        """Have as many actors coming as there are vacant numbers."""
        vacant = len(self._vacant())
        while len(self._coming) > vacant:
            self._ray.kill(self._coming.pop().handle)
        for _ in range(len(self._coming), vacant):
            self._coming.append(self._ask(num_cpus=1, scheduling_strategy="SPREAD"))

    def _ask(self, **where: Any) -> _Actor:
        remote = self._ray.remote(ray_actor.RayWorker).options(max_restarts=0, max_task_retries=0, **where)
        handle = remote.remote([self._job])
        machines = frozenset(node["NodeID"] for node in self._ray.nodes() if node["Alive"])
        return _Actor(handle, time.monotonic(), machines, handle.arrive.remote())

    def _retire(self, actor: _Actor) -> None:
        """Let an actor go when it has brought what it has."""
        actor.is_retired = True
        self._leaving.append(actor)
        self._dismiss()

    def _dismiss(self) -> None:
        """Send those home that were told to go and have nothing left to do."""
        for actor in [actor for actor in self._leaving if not actor.errands]:
            self._leaving.remove(actor)
            actor.handle.leave.remote()

    def _see_to_room(self) -> None:
        """Where batches wait for a worker that has found no core for long, have one come that shares another's core."""
        now = time.monotonic()
        awaited = [number for number in self._vacant() if self._own.get(number)]
        overdue = [actor for actor in self._coming if now - actor.since > ROOM_S and not actor.shares_core]
        sharing = sum(actor.shares_core for actor in self._coming)
        hosts = [actor.arrival for actor in self._seats if actor is not None and actor.arrival is not None]
        for number in awaited[sharing : len(overdue)] if hosts else ():
            beside = self._cluster.on(hosts[number % len(hosts)].machine, only=False)
            self._coming.insert(0, self._ask(num_cpus=0, scheduling_strategy=beside))
            self._coming[0].shares_core = True
        if not hosts and not self._has_warned and any(now - actor.since > _WARN_S for actor in self._coming):
            self._has_warned = True
            there, free = self._cluster.room()
            warnings.warn(
                f"no worker has found room in the Ray cluster for {_WARN_S:g} s: each takes 1 CPU, and the cluster "
                f"has {there:g}, {free:g} of them free; add machines (`ray start --address=...`), or end what "
                "occupies them",
                stacklevel=2,
            )

    # ── giving out ──────────────────────────────────────────────────────────────────────────────────────────

    def announce(self, number: int, slab: Slab | None) -> None:
        """Do nothing: slots are filled from this process."""

    def submit(self, piece: Piece) -> None:
        """Give out a piece; never blocks."""
        self._cluster.require()
        self._outstanding[piece.seq] = piece
        if piece.worker is None:
            self._queue.append(piece)
        else:
            self._own.setdefault(piece.worker, deque()).append(piece)
        self._send()

    def _send(self) -> None:
        depth = 2 if self._typical_ns is not None and self._typical_ns < _SHORT_NS else 1
        free = []
        for number, actor in enumerate(self._seats):
            if actor is None or not actor.is_open:
                continue
            making = actor.making()
            own = self._own.get(number)
            while own and making < depth:
                self._hand(actor, own.popleft())
                making += 1
            free += [(taken, number, actor) for taken in range(making, depth)]
        for _, _, actor in sorted(free, key=lambda place: place[:2]):  # first those who have nothing at all
            if not self._queue:
                return
            self._hand(actor, self._queue.popleft())

    def _hand(self, actor: _Actor, piece: Piece) -> None:
        order = replace(piece, slot=None, into=None)
        head, body = actor.handle.make.options(num_returns=2).remote(order)
        actor.errands.append(_Errand(piece, head, body))

    def rewind(self, worker: int) -> None:
        """Put a worker's random state back to where it was before its first piece."""
        actor = self._seats[worker]
        if actor is not None and actor.arrival is not None:
            actor.handle.rewind.remote()

    # ── taking back ─────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, timeout_s: float | None) -> list[Report | Death]:
        """Wait until something happens, at most `timeout_s` seconds, and return all that has happened."""
        self._cluster.require()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._hear(self._wait(remaining))
            self._see_to_room()
            self._dismiss()
            self._send()
            if events or (remaining is not None and remaining <= 0):
                return events

    def _everybody(self) -> list[_Actor]:
        return [*(actor for actor in self._seats if actor is not None), *self._leaving]

    def _wait(self, timeout_s: float | None) -> set[Any]:
        """Return the references that something has become of; waits for one for at most so long, or a second."""
        awaited = [actor.arriving for actor in self._coming]
        awaited += [inquest.reading for inquest in self._inquests]
        for actor in self._everybody():
            if actor.opening is not None:
                awaited.append(actor.opening)
            awaited += [errand.head for errand in actor.errands if errand.report is None]
            awaited += [errand.body for errand in actor.errands if errand.report is not None and not errand.is_here]
        if not awaited:
            return set()
        is_watching = self._coming or self._inquests
        if is_watching and (timeout_s is None or timeout_s > 1.0):
            timeout_s = 1.0
        ready, rest = self._ray.wait(awaited, num_returns=1, timeout=timeout_s)
        if ready and rest:
            more, _ = self._ray.wait(rest, num_returns=len(rest), timeout=0)
            ready += more
        return set(ready)

    def _hear(self, ready: set[Any]) -> list[Report | Death]:
        events: list[Report | Death] = []
        for actor in [actor for actor in self._coming if actor.arriving in ready]:
            if actor in self._coming:  # one that came first may have left no vacant number
                events += self._seat(actor)
        for actor in self._everybody():
            events += self._hear_from(actor, ready)
        now = time.monotonic()
        for inquest in [one for one in self._inquests if one.reading in ready or now > one.deadline]:
            self._inquests.remove(inquest)
            events.append(self._verdict(inquest, is_read=inquest.reading in ready))
        return events

    def _seat(self, actor: _Actor) -> list[Report | Death]:
        """Give an actor that has found room the lowest vacant number."""
        self._coming.remove(actor)
        number = actor.number = self._vacant()[0]
        try:
            actor.arrival = self._ray.get(actor.arriving)
        except self._ray.exceptions.RayError as error:
            return self._bury(actor, error)
        self._seats[number] = actor
        self._fill_up()
        epoch = self._dataset.epoch if isinstance(self._dataset, Stream) else None
        options = replace(self._options, worker=number, lanes=self._share(number), epoch=epoch)
        actor.opening = actor.handle.open.remote(options)
        return []

    def _hear_from(self, actor: _Actor, ready: set[Any]) -> list[Report | Death]:
        reports: list[Report | Death] = []
        try:
            if actor.opening in ready:
                self._ray.get(actor.opening)
                actor.opening, actor.is_open = None, True
            for errand in actor.errands:
                if errand.report is None and errand.head in ready:
                    errand.report = self._report(actor, errand)
                    errand.is_here = errand.report.envelope is None or errand.report.nbytes == 0
                elif errand.report is not None and not errand.is_here:
                    errand.is_here = errand.body in ready
            while actor.errands and actor.errands[0].is_here:
                reports.append(self._land(actor.errands[0]))
                actor.errands.popleft()
        except self._ray.exceptions.RayError as error:
            return [*reports, *self._bury(actor, error)]
        return reports

    def _report(self, actor: _Actor, errand: _Errand) -> Report:
        """Return what an actor has said of a piece."""
        try:
            report: Report = self._ray.get(errand.head)
        except self._ray.exceptions.RayTaskError:  # not the dataset's: those come in the report
            assert actor.number is not None
            error = ExceptionWrapper(where=f"in DataLoader worker process {actor.number}")
            return Report(errand.piece.seq, actor.number, error=error)
        report.state = pickle.loads(report.state) if report.state else None
        report.began_ns = time.perf_counter_ns() - report.fetch_ns - report.collate_ns
        took = report.fetch_ns + report.collate_ns
        self._typical_ns = took if self._typical_ns is None else 0.8 * self._typical_ns + 0.2 * took
        return report

    def _land(self, errand: _Errand) -> Report:
        """Return the report of a piece whose bytes are here, with the bytes in its slot or in a slab of their own."""
        report, piece = errand.report, errand.piece
        assert report is not None
        if report.nbytes and report.envelope is not None and not piece.cancelled:
            body = self._ray.get(errand.body)
            if body is not None:
                memory = piece.slot.memory if piece.slot is not None else memoryview(b"")
                if body.nbytes > len(memory):
                    report.oversize = PrivateSlab(round_up(body.nbytes, PAGE))
                    memory = report.oversize.memory
                np.frombuffer(memory, np.uint8)[: body.nbytes] = body
        report.piece = self._outstanding.pop(report.seq)
        return report

    # ── deaths ──────────────────────────────────────────────────────────────────────────────────────────────

    def _bury(self, actor: _Actor, error: Exception) -> list[Report | Death]:
        """Find out what an actor had that cannot be reached any more, and why that is."""
        number = actor.number
        assert number is not None
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor.handle)  # who only seemed to be gone must not come back
        lost = [errand.piece for errand in actor.errands]
        actor.errands.clear()
        if actor.is_retired:
            self._leaving.remove(actor)
        else:
            if self._seats[number] is actor:
                self._seats[number] = None
            lost += self._own.pop(number, ())
        if actor.is_retired and not lost:
            return []
        cause, arrival = _cause(error, actor), actor.arrival
        if self._is_innocent(actor, error):
            return [self._death(actor, cause, lost, is_innocent=True)]
        if arrival is None or not lost:
            return [self._death(actor, cause, lost)]
        reading = (
            self._ray.remote(ray_note.read_note)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=self._cluster.on(arrival.machine, only=True))
            .remote(arrival.note)
        )
        self._inquests.append(_Inquest(actor, cause, lost, reading, time.monotonic() + _INQUEST_S))
        return []

    def _is_innocent(self, actor: _Actor, error: Exception) -> bool:
        """Return whether a death says nothing about what the actor was doing: its machine has gone, as far as we know.

        Of a process that died on a machine that lives Ray knows, because the machine has told it.
        """
        failures = self._ray.exceptions
        if not isinstance(error, failures.ActorDiedError | failures.OutOfMemoryError) or _is_preempted(error):
            return True
        if actor.arrival is not None:
            return not self._cluster.has_machine(actor.arrival.machine)
        return not all(self._cluster.has_machine(machine) for machine in actor.machines)

    def _verdict(self, inquest: _Inquest, *, is_read: bool) -> Death:
        """Return the death with the sample that is to blame; with none when the note could not be read."""
        if is_read:
            try:
                seq, row = self._ray.get(inquest.reading)
            except self._ray.exceptions.RayError:
                is_read = False
            else:
                blamed = next((piece for piece in inquest.lost if piece.seq == seq), None)
                return self._death(inquest.actor, inquest.cause, inquest.lost, blamed=blamed, row=row)
        return self._death(inquest.actor, inquest.cause, inquest.lost, is_innocent=True)

    def _death(
        self,
        actor: _Actor,
        cause: str,
        lost: list[Piece],
        *,
        blamed: Piece | None = None,
        row: int = 0,
        is_innocent: bool = False,
    ) -> Death:
        for piece in lost:
            del self._outstanding[piece.seq]
        assert actor.number is not None
        pid = actor.arrival.pid if actor.arrival is not None else 0
        return Death(actor.number, pid, cause, lost, blamed, row, actor.is_retired, is_innocent)

    def piece(self, worker: int) -> tuple[Piece | None, int]:
        """Return the piece that a worker is making; which row is known only on its machine."""
        actor = self._seats[worker]
        if actor is None:
            return None, 0
        return next((errand.piece for errand in actor.errands if errand.report is None), None), 0

    def cancel(self, lanes: Sequence[Lane]) -> list[Piece]:
        """Abandon all pieces and begin a new epoch with these lanes; return the pieces that no worker had taken.

        Those that a worker has, two at most, it makes to the end: `ray.cancel` has left calls that never came back.
        """
        self._cluster.require()
        self._lanes = [*lanes]
        untaken = [*self._queue, *(piece for own in self._own.values() for piece in own)]
        self._queue.clear()
        self._own.clear()
        for piece in untaken:
            del self._outstanding[piece.seq]
        for piece in self._outstanding.values():
            piece.cancelled = True
        for actor in self._everybody():
            actor.handle.begin_epoch.remote(self._share(actor.number) if actor.number is not None else {})
        return untaken

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Have the actors leave, and wait for them; who does not leave in time is killed."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        if not self._cluster.is_there:  # the program has shut Ray down, and the actors with it
            self._cluster.leave()
            return
        everybody = self._everybody()
        try:
            leaving = [actor.handle.leave.remote() for actor in everybody]
            if leaving:
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
            for actor in (*everybody, *self._coming):
                self._ray.kill(actor.handle)
        finally:
            self._cluster.leave()


def _is_preempted(error: Exception) -> bool:
    """Return whether Ray says that the machine was about to be taken away."""
    return bool(getattr(error, "preempted", False))


def _root(error: BaseException) -> BaseException:
    """Return what Ray's error came from: its own words for it fill a screen."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _cause(error: Exception, actor: _Actor) -> str:
    where = f"on machine {actor.arrival.address}" if actor.arrival is not None else "that had just found a machine"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if line.startswith("The actor")), lines[0] if lines else "")
    if actor.arrival is None and lines and lines[-1] != told:  # it could not be set up: why is in the last line
        told = lines[-1]
    return f"{where} has gone ({told[:300]})."
