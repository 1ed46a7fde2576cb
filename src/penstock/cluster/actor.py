"""The life of a worker that is a Ray actor, on the machine where Ray has found room for it.

    arrive ──▶ open ──▶ make, make, ... (begin_epoch in between) ──▶ leave

Calls come from one process, the training process, and Ray runs them in their order, one at a time. A batch is
collated into memory of this process that is used again; its bytes go to Ray's object store, and from there to the
training process's slot. How far a batch has come is noted on this machine (`crash_note`), so that the sample on which
this process dies can be found out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.cluster.crash_note import CrashNote
from penstock.cluster.script_classes import reduce_script_class
from penstock.core.shared_segment import PAGE
from penstock.core.units import round_up
from penstock.data.optional import need
from penstock.loader.collate import set_current_arena
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena, ArenaFullError
from penstock.loader.workers.batch_fetcher import BatchFetcher
from penstock.loader.workers.fetch_result import NothingLeftError
from penstock.loader.workers.pool import Task, TaskResult
from penstock.loader.workers.stream_shard import StreamShard
from penstock.loader.workers.worker_context import WorkerContext, WorkerOptions
from penstock.loader.workers.worker_spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where an actor runs."""

    pid: int
    machine: str
    """Ray's id of the node."""
    address: str
    note: str


class _Tick:
    """Notes which row of a task is made."""

    def __init__(self, note: CrashNote, seq: int) -> None:
        self._note = note
        self._seq = seq

    def __call__(self, row: int) -> None:
        self._note.write(self._seq, row)

    def notes(self, first_row: int) -> None:
        return None


class RayWorker:
    """One worker; `ray.remote` makes an actor class of it.

    Args:
        spec_refs: a list of one reference to the spec. In a list Ray does not open it, so that a spec
            that cannot be opened here is an error of the first task, with its traceback, and the actor lives.
    """

    _worker_context: WorkerContext
    """Set by `open`."""

    def __init__(self, spec_refs: list[Any]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU only, wherever Ray has put it
        self._ray = need("ray", "ray")
        self._context = self._ray.get_runtime_context()
        self._spec_refs = spec_refs
        self._memory = np.empty(0, np.uint8)
        self._worker = -1
        self._note = CrashNote()

    def arrive(self) -> Arrival:
        """Return where this actor runs; returning at all means that there was room."""
        address = self._ray.util.get_node_ip_address()
        return Arrival(os.getpid(), self._context.get_node_id(), address, self._note.path)

    def open(self, options: WorkerOptions) -> None:
        """Become the worker of `options`, and open the dataset. A failure is the result of every task."""
        self._worker = options.worker
        self._worker_context = WorkerContext(
            options,
            self._open_worker_spec,
            where=f"in DataLoader worker process {options.worker} (pid {os.getpid()}) on {self.arrive().address}",
            dumps=need("ray.cloudpickle", "ray").dumps,
        )
        self._spec_refs = []

    def _open_worker_spec(self) -> WorkerSpec:
        return cast(WorkerSpec, self._ray.get(self._spec_refs[0]))

    def make(self, task: Task) -> tuple[TaskResult, np.ndarray | None]:
        """Make a task; return its result, and the bytes (uint8) that belong in its slot."""
        result = TaskResult(task.seq, self._worker)
        result.pid = os.getpid()
        data: np.ndarray | None = None
        try:
            if (failure := self._worker_context.take_failure()) is not None:
                result.error = failure
            elif (fetcher := self._worker_context.fetcher(task.shard)) is None:
                result.ended = True
            else:
                data = self._make(fetcher, task, result)
        except NothingLeftError as nothing:
            result.empty, result.skipped = True, nothing.fetched.skipped
        except Exception:
            result.error = self._worker_context.wrap_exception()
        return result, data

    def _make(self, fetcher: BatchFetcher, task: Task, result: TaskResult) -> np.ndarray | None:
        def enlarge(needed: int) -> Arena:
            self._memory = np.empty(round_up(needed + needed // 8, PAGE), np.uint8)
            return Arena(self._memory)

        arena = Arena(self._memory)
        set_current_arena(arena)
        try:
            fetched = fetcher.make(
                task.indices, arena, epoch_seed=task.epoch_seed, tick=_Tick(self._note, task.seq), enlarge=enlarge
            )
            if task.wants_state or fetched.ended:
                result.state = self._worker_context.state(fetcher, ended=fetched.ended)
            result.samples, result.skipped, result.ended = fetched.samples, fetched.skipped, fetched.ended
            result.fetch_ns, result.collate_ns = fetched.fetch_ns, fetched.collate_ns
            if fetched.ended:
                return None
            assert fetched.arena is not None
            try:
                result.envelope = codec.encode(fetched.batch, fetched.arena, reduce_script_class)
            except ArenaFullError as error:
                fetched.arena = enlarge(error.needed)
                result.envelope = codec.encode(fetched.batch, fetched.arena, reduce_script_class)
        finally:
            set_current_arena(None)
        result.nbytes = fetched.arena.used
        return None if codec.is_inline(result.envelope) else self._memory[: fetched.arena.used]

    def begin_epoch(self, shards: dict[int, StreamShard]) -> None:
        """Begin a new epoch."""
        self._worker_context.begin_epoch(shards)

    def leave(self) -> None:
        """End this process as a program ends: exit handlers that the dataset has registered are run."""
        self._note.remove()
        self._ray.actor.exit_actor()
