"""The life of a worker that is a Ray actor, on the machine where Ray has found room for it.

    arrive ──▶ open ──▶ make, make, ... (begin_epoch in between) ──▶ leave

Calls come from one process, the training process, and Ray runs them in their order, one at a time. A batch is
collated into memory of this process that is used again; its bytes go to Ray's object store, and from there to the
training process's slot. How far a batch has come is noted on this machine (`crash_note`), so that the sample on which
this process dies can be found out.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from penstock.cluster.crash_note import CrashNote
from penstock.cluster.script_classes import reduce_script_class
from penstock.core.shared_segment import PAGE
from penstock.core.units import round_up
from penstock.data.optional import need
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.stream_shard import StreamShard
from penstock.loader.workers.worker import ProcessWorker, WorkerOptions
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

    _worker: ProcessWorker
    """Set by `open`."""

    def __init__(self, spec_refs: list[Any]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU only, wherever Ray has put it
        self._ray = need("ray", "ray")
        self._context = self._ray.get_runtime_context()
        self._spec_refs = spec_refs
        self._memory = np.empty(0, np.uint8)
        self._note = CrashNote()

    def arrive(self) -> Arrival:
        """Return where this actor runs; returning at all means that there was room."""
        address = self._ray.util.get_node_ip_address()
        return Arrival(os.getpid(), self._context.get_node_id(), address, self._note.path)

    def open(self, options: WorkerOptions) -> None:
        """Become the worker of `options`, and open the dataset. A failure is the result of every task."""
        self._worker = ProcessWorker(
            options,
            self._open_worker_spec,
            where=f"in DataLoader worker process {options.worker} (pid {os.getpid()}) on {self.arrive().address}",
            encode=functools.partial(codec.encode, carry=reduce_script_class),
            enlarge=self._enlarge,
            dumps=need("ray.cloudpickle", "ray").dumps,
        )
        self._spec_refs = []

    def _open_worker_spec(self) -> WorkerSpec:
        return cast(WorkerSpec, self._ray.get(self._spec_refs[0]))

    def make(self, task: Task) -> tuple[Result, np.ndarray | None]:
        """Make a task; return its result, and the bytes (uint8) that belong in its slot."""
        result = self._worker.run_task(task, Arena(self._memory), tick=_Tick(self._note, task.seq))
        result.pid = os.getpid()
        is_here = result.envelope is None or codec.is_inline(result.envelope)
        return result, None if is_here else self._memory[: result.nbytes]

    def _enlarge(self, needed: int, result: Result) -> Arena:
        self._memory = np.empty(round_up(needed + needed // 8, PAGE), np.uint8)
        return Arena(self._memory)

    def begin_epoch(self, shards: dict[int, StreamShard]) -> None:
        """Begin a new epoch."""
        self._worker.begin_epoch(shards)

    def leave(self) -> None:
        """End this process as a program ends: exit handlers that the dataset has registered are run."""
        self._note.remove()
        self._ray.actor.exit_actor()
