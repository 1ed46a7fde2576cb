"""The life of a worker that is a Ray actor, on whatever machine Ray has room.

    arrive ──▶ open ──▶ make, make, ... (begin_epoch, rewind in between) ──▶ leave

Calls come from one process, the training process, and Ray runs them in their order, one at a time. A batch is
collated into memory of this process that is used again; its bytes go to Ray's object store, and from there to the
training process's slot. How far a batch has come is noted on this machine (`ray_note`), for whoever has to find out on
which sample this process died.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from penstock.core.units import round_up
from penstock.feed.collate import set_current_room
from penstock.feed.sources.extras import need
from penstock.feed.transport import codec
from penstock.feed.transport.room import NoRoomError, Room
from penstock.feed.transport.slab import PAGE
from penstock.feed.workers.base import Piece, Report
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.maker import BatchMaker, Job, NothingLeftError
from penstock.feed.workers.ray_classes import carry
from penstock.feed.workers.ray_note import Note
from penstock.feed.workers.workshop import WorkerOptions, Workshop


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where an actor has found room."""

    pid: int
    machine: str
    """Ray's id of the node."""
    address: str
    note: str


class RayWorker:
    """One worker; `ray.remote` makes an actor class of it.

    Args:
        jobs: a list of one reference to the job and worker_init_fn. (In a list, so that a job that cannot be opened
            here is an error of this worker's first piece, with its traceback, rather than an actor that dies.)
    """

    _shop: Workshop

    def __init__(self, jobs: list[Any]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU only, wherever Ray has put it
        self._ray = need("ray", "ray")
        self._context = self._ray.get_runtime_context()
        self._jobs = jobs
        self._memory = np.empty(0, np.uint8)
        self._worker = -1
        self._init_fn: Callable[[int], Any] | None = None
        self._note = Note()

    def arrive(self) -> Arrival:
        """Say that there was room, and where."""
        address = self._ray.util.get_node_ip_address()
        return Arrival(os.getpid(), self._context.get_node_id(), address, self._note.path)

    def open(self, options: WorkerOptions) -> None:
        """Become the worker that `options` says, and open the dataset. A failure is told with the first piece."""
        self._worker = options.worker
        self._shop = Workshop(
            replace(options, init_fn=self._init),
            self._open_job,
            where=f"in DataLoader worker process {options.worker} (pid {os.getpid()}) on {self.arrive().address}",
            dumps=need("ray.cloudpickle", "ray").dumps,
        )
        self._jobs = []

    def _open_job(self) -> Job:
        job, self._init_fn = self._ray.get(self._jobs[0])
        return cast(Job, job)

    def _init(self, worker: int) -> None:
        if self._init_fn is not None:
            self._init_fn(worker)

    def make(self, piece: Piece) -> tuple[Report, np.ndarray | None]:
        """Make a piece: what became of it, and the bytes (uint8) that belong into its slot."""
        report = Report(piece.seq, self._worker, pid=os.getpid())
        body: np.ndarray | None = None
        try:
            if (broken := self._shop.take_failure()) is not None:
                report.error = broken
            elif (maker := self._shop.maker(piece.lane)) is None:
                report.ended = True
            else:
                body = self._make(maker, piece, report)
        except NothingLeftError as nothing:
            report.empty, report.skipped = True, nothing.made.skipped
        except Exception:
            report.error = self._shop.wrap_exception()
        report.evidence = self._shop.evidence()
        return report, body

    def _make(self, maker: BatchMaker, piece: Piece, report: Report) -> np.ndarray | None:
        def tick(row: int) -> None:
            self._note.write(piece.seq, row)

        def enlarge(needed: int) -> Room:
            self._memory = np.empty(round_up(needed + needed // 8, PAGE), np.uint8)
            return Room(self._memory)

        room = Room(self._memory)
        set_current_room(room)
        try:
            made = maker.make(piece.indices, room, epoch_seed=piece.epoch_seed, tick=tick, enlarge=enlarge)
            if piece.snapshot or made.ended:
                report.state = self._shop.state(maker, ended=made.ended)
            report.samples, report.skipped, report.ended = made.samples, made.skipped, made.ended
            report.fetch_ns, report.collate_ns = made.fetch_ns, made.collate_ns
            if made.ended:
                return None
            assert made.room is not None
            try:
                report.envelope = codec.encode(made.batch, made.room, carry)
            except NoRoomError as error:
                made.room = enlarge(error.needed)
                report.envelope = codec.encode(made.batch, made.room, carry)
        finally:
            set_current_room(None)
        report.nbytes = made.room.used
        return None if codec.is_inband(report.envelope) else self._memory[: made.room.used]

    def begin_epoch(self, lanes: dict[int, Lane]) -> None:
        """Begin a new epoch."""
        self._shop.begin_epoch(lanes)

    def rewind(self) -> None:
        """Put the random states back to where they were before the first piece."""
        self._shop.rewind()

    def leave(self) -> None:
        """End this process, as a program ends: what the dataset has registered for its end is run."""
        self._note.remove()
        self._ray.actor.exit_actor()
