"""A worker's inbox, of which a thread requests what the next tasks will read from remote storage.

    worker      receives a message ▸ makes its batch ▸ receives the next
    thread      only while the worker makes a batch, and only of a source that reads small remote files: takes the
                messages that arrive, and has the files of a task requested. The worker finds both here, in order

What cannot be requested ahead is left to the worker: errors are raised where a sample is read.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.core.errors import TransportError
from penstock.data.storage.object_batch import ObjectBatch
from penstock.loader.transport import channel
from penstock.loader.workers import messages
from penstock.loader.workers.worker_spec import Prefetch

_Message = tuple[bytes, list[int]]


class Inbox:
    """Messages to a worker, one at a time.

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
