"""The life of a worker process, from its first line to its last.

It runs the user's dataset and collate function, and nothing of the training loop: this module and what it imports
must not import `penstock.device`. The process ends when its inbox is closed, which the kernel does when the training
process is killed, and then also in the middle of a sample.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import os
import pickle
import select
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from penstock.core.errors import TransportError
from penstock.core.shared_segment import Handle, SharedSegment, attach, create
from penstock.data.storage.object_batch import ObjectBatch
from penstock.loader.transport import channel, codec
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.control_page import IDLE, ControlPage
from penstock.loader.workers import messages
from penstock.loader.workers.lasting_effects import LastingEffects
from penstock.loader.workers.messages import Result, Task
from penstock.loader.workers.worker import CancelledError, ProcessWorker, WorkerOptions
from penstock.loader.workers.worker_spec import Prefetch, WorkerSpec

_ORPHAN_GRACE_S = 5.0
"""How long a worker whose training process is gone may take to finish a sample before it ends anyway."""

_MALLOPT: Any = getattr(ctypes.CDLL(None), "mallopt", None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_NBYTES = 32 << 20


def main(options: WorkerOptions, ends: WorkerChannels, worker_spec: WorkerSpec) -> None:
    """Run a worker until its inbox closes."""
    with contextlib.suppress(channel.Closed):
        _watch_for_orphanhood(ends.inbox)
        # Ctrl-C reaches the whole process group; the training process decides what follows from it.
        signal.signal(signal.SIGINT, lambda *_: None)
        _keep_freed_memory()
        _Worker(options, ends, worker_spec).run()


def _keep_freed_memory() -> None:
    """Have glibc keep what samples have freed for the next ones, up to the limits that it raises itself to in the end.

    Until then it returns the temporary arrays of each expression to the system, and the next ones are pages that the
    system clears again: two thirds of the time of NumPy arithmetic on arrays of 640 KiB. Source: mallopt(3).
    """
    if _MALLOPT is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        _MALLOPT(_M_MMAP_THRESHOLD, _MMAP_NBYTES)
        _MALLOPT(_M_TRIM_THRESHOLD, 2 * _MMAP_NBYTES)


def _watch_for_orphanhood(inbox: socket.socket) -> None:
    def watch() -> None:
        channel.wait_for_hangup(inbox)
        threading.Event().wait(_ORPHAN_GRACE_S)
        os._exit(0)

    with contextlib.suppress(RuntimeError):  # no thread can be started: the worker then ends after its sample
        threading.Thread(target=watch, name="penstock-orphan-watch", daemon=True).start()


class _Tick:
    """Writes to the control page which row is made, and reads there whether its epoch is still running."""

    __slots__ = ("_cell", "_cells", "_epoch")

    def __init__(self, cells: memoryview, cell: int, epoch: int) -> None:
        self._cells = cells
        self._cell = cell
        self._epoch = epoch

    def __call__(self, row: int) -> None:
        if self._cells[0] != self._epoch:
            raise CancelledError
        self._cells[self._cell] = row

    def notes(self, first_row: int) -> Iterator[None]:
        cells: Any = self._cells
        return map(operator.setitem, itertools.repeat(cells), itertools.repeat(self._cell), itertools.count(first_row))


class _Worker:
    def __init__(self, options: WorkerOptions, ends: WorkerChannels, worker_spec: WorkerSpec) -> None:
        self._options = options
        self._ends = ends
        self._pid = os.getpid()
        self._shared = channel.Receiver(ends.shared)
        self._control = ControlPage.attach(ends.control_nbytes, ends.control.fd, ends.lock.fd)
        self._cells = self._control.cells
        self._claim_cell = self._control.claim_cell(options.worker)
        self._inbox = Inbox(ends.inbox, lambda epoch: self._cells[0] == epoch)
        self._segments: dict[int, tuple[SharedSegment, np.ndarray]] = {}
        self._is_retired = False
        torch.multiprocessing._set_thread_name("pt_data_worker")
        self._worker = ProcessWorker(
            options,
            lambda: worker_spec,
            where=f"in DataLoader worker process {options.worker}",
            encode=functools.partial(codec.encode, shares=True),
            enlarge=self._enlarge,
            dumps=pickle.dumps,
            settle_workers=None if options.is_settled else self._control.settle_workers,
        )
        if (prefetch := self._worker.prefetch) is not None:
            self._inbox.look_ahead(prefetch)
        self._effects: LastingEffects | None = None
        self._tasks = 0

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Take tasks until the inbox closes, or this worker is retired.

        A shared task wakes one worker, not all that have nothing to do. A worker that ends without taking it loses no
        task: the training process sends what is in the shared queue again when a worker has ended.
        """
        inbox = self._ends.inbox.fileno()
        with select.epoll() as poller:
            poller.register(inbox, select.EPOLLIN)
            poller.register(self._ends.shared, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            if self._options.is_watched and (fetcher := self._worker.fetcher(0)) is not None:
                self._effects = LastingEffects(fetcher.worker_spec)
            self._cells[self._claim_cell + 1] = 1  # before a worker's first claim: it is ready
            while not self._is_retired:
                if self._inbox.has_taken or inbox in (fd for fd, _ in poller.poll()):
                    self._read_inbox()
                else:
                    self._take_shared_task()

    def _read_inbox(self) -> None:
        payload, fds = self._inbox.receive()
        kind = payload[:1]
        if kind == b"W":
            self._work(memoryview(payload)[1:])
            self._note_effects()
            self._cells[self._claim_cell + 1] = IDLE
        elif kind == b"S":
            self._attach_segment(fds, *pickle.loads(memoryview(payload)[1:]))
        elif kind == b"F":
            segment, memory = self._segments.pop(pickle.loads(memoryview(payload)[1:]))
            del memory
            segment.close()
        elif kind == b"E":
            self._worker.begin_epoch(pickle.loads(memoryview(payload)[1:]))
        elif kind == b"Q":
            self._is_retired = True

    def _note_effects(self) -> None:
        """Note what samples have left behind, after the first, second, fourth, eighth ... task: it takes 0.1 ms."""
        self._tasks += 1
        if self._effects is None or self._tasks & (self._tasks - 1):
            return
        if self._effects.are_there():
            self._control.note_effects()
            self._effects = None

    def _attach_segment(self, fds: list[int], number: int, nbytes: int) -> None:
        segment = attach(Handle(nbytes, fds[0]))
        self._segments[number] = (segment, np.frombuffer(segment.memory, np.uint8))

    def _take_shared_task(self) -> None:
        """Take a task from the shared queue, unless another worker was faster, and claim it under the lock."""
        with self._control.lock():
            message = self._shared.receive(block=False)
            if message is None:
                return
            self._cells[self._claim_cell] = messages.task_seq(message[0]) + 1
        self._work(memoryview(message[0]))
        self._note_effects()
        self._cells[self._claim_cell + 1] = IDLE

    # ── one task ───────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, message: memoryview) -> None:
        seq, epoch = messages.task_seq(message), messages.task_epoch(message)
        cells, row_cell = self._cells, self._claim_cell + 1
        cells[row_cell] = 0
        cells[self._claim_cell] = seq + 1
        if cells[0] != epoch:
            self._inbox.drop_prefetched(seq)
            result = Result(seq, self._options.worker)
            result.cancelled = True
            self._send(result)
            return
        try:
            result = self._made(*messages.unpack_task(message), epoch)
        except channel.Closed:
            raise
        except Exception:  # of indices that cannot be unpickled, or requested ahead
            result = Result(seq, self._options.worker, error=self._worker.wrap_exception())
        try:
            self._send(result)
        finally:
            if result.oversize is not None:
                result.oversize.close()

    def _made(self, task: Task, place: tuple[int, int, int] | None, epoch: int) -> Result:
        memory = np.empty(0, np.uint8)
        if place is not None:
            segment, offset, nbytes = place
            while segment not in self._segments:  # its announcement was sent before this task, and is on its way
                self._read_inbox()
            memory = self._segments[segment][1][offset : offset + nbytes]
        tick = _Tick(self._cells, self._claim_cell + 1, epoch)
        with self._inbox.working():
            prefetched = self._inbox.prefetched(task.seq, task.indices)
            return self._worker.run_task(task, Arena(memory), tick=tick, prefetched=prefetched)

    def _enlarge(self, needed: int, result: Result) -> Arena:
        """Return an arena in a new segment, for a batch that outgrew its slot."""
        result.oversize = create(needed)
        return Arena(np.frombuffer(result.oversize.memory, np.uint8))

    def _send(self, result: Result) -> None:
        channel.send(self._ends.results, *messages.pack_result(result, self._pid))


class Descriptor:
    """A file descriptor that survives being pickled into a worker process, by whatever start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        """Duplicate the descriptor; multiprocessing allows this only while it starts a process."""
        return _receive_descriptor, (DupFd(self.fd),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


@dataclass(frozen=True, slots=True)
class WorkerChannels:
    """A worker process's ends of its channels, and the control page."""

    inbox: socket.socket
    shared: socket.socket
    results: socket.socket
    control_nbytes: int
    control: Descriptor
    lock: Descriptor


_Message = tuple[bytes, list[int]]


class Inbox:
    """Messages to a worker, one at a time; a thread requests what the next tasks will read from remote storage.

        worker      receives a message ▸ makes its batch ▸ receives the next
        thread      only while the worker makes a batch, and only of a source that reads small remote files: takes the
                    messages that arrive, and has the files of a task requested. The worker finds both here, in order

    What cannot be requested ahead is left to the worker: errors are raised where a sample is read.

    Args:
        end: of the channel.
        is_running: whether an epoch, by its number, is still the one that runs.
    """

    def __init__(self, end: socket.socket, is_running: Callable[[int], bool]) -> None:
        self._end = end
        self._is_running = is_running
        self._receiver = channel.Receiver(end)
        self._lock = threading.Lock()
        self._taken: deque[_Message | TransportError] = deque()
        self._working = threading.Event()
        self._prefetch: Prefetch | None = None
        self._prefetched: dict[int, ObjectBatch] = {}

    def look_ahead(self, prefetch: Prefetch) -> None:
        """Have a thread take messages while the worker is `working`."""
        self._prefetch = prefetch
        with contextlib.suppress(RuntimeError):  # no thread can be started: files are requested batch by batch
            threading.Thread(target=self._take_ahead, name="penstock-look-ahead", daemon=True).start()

    def receive(self) -> _Message:
        """Return the next message; waits for it.

        Raises:
            Closed: the other side is gone.
            TransportError: no descriptor is left for what came with it.
        """
        with self._lock:
            message = self._taken.popleft() if self._taken else self._receiver.receive()
        assert message is not None
        if isinstance(message, TransportError):
            raise message
        return message

    @property
    def has_taken(self) -> bool:
        """Whether a message is here already. Does not change while the worker is not `working`."""
        return bool(self._taken)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Make a batch in the `with` block: messages may be taken meanwhile."""
        self._working.set()
        try:
            yield
        finally:
            with self._lock:
                self._working.clear()

    def prefetched(self, seq: int, indices: Any) -> ObjectBatch | None:
        """Return what was requested for a task, or is now; to be entered, or closed."""
        with self._lock:
            found = self._prefetched.pop(seq, None)
        if found is None and self._prefetch is not None:
            found = self._prefetch(indices)
        return found

    def drop_prefetched(self, seq: int) -> None:
        """Cancel the requests for a task that is not made."""
        with self._lock:
            found = self._prefetched.pop(seq, None)
        if found is not None:
            found.close()

    def _take_ahead(self) -> None:
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        with contextlib.suppress(channel.Closed):  # the worker will see it, too
            while True:
                self._working.wait()
                poller.poll()
                with self._lock:
                    if self._working.is_set():
                        self._take_one()

    def _take_one(self) -> None:
        try:
            message = self._receiver.receive(block=False)
        except TransportError as error:
            self._taken.append(error)
            return
        if message is None:
            return
        self._taken.append(message)
        if message[0][:1] == b"W":
            with contextlib.suppress(Exception):
                self._request(memoryview(message[0])[1:])

    def _request(self, task: memoryview) -> None:
        if self._prefetch is not None and self._is_running(messages.task_epoch(task)):
            found = self._prefetch(messages.indices_of(task))
            if found is not None:
                self._prefetched[messages.task_seq(task)] = found
