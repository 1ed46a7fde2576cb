"""Small remote files, read whole: one request each, those of a batch side by side.

    request     the first `nbytes` bytes of the file, by one request that also says its size and version
    larger      the rest is read in ranges of the same version, see `remote_file`
    cached      the version is looked up first, unless a listing has it; where the cache has a copy, nothing is fetched
    batch       while an `ObjectBatch` is entered, its thread gets its files from it, in any order, as if each were
                requested when it is read. Errors are raised where the file is read
    ahead       a batch may be started before it is entered: its files are requested when those of the batch before it
                are under way. At most `AHEAD` files of both, and `AHEAD_NBYTES`, are under way or not read yet

Nothing of a batch crosses a fork: a child requests what it reads by itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from penstock.data.storage.backend import Backend, FileVersion
from penstock.data.storage.cache.disk_cache import DiskCache
from penstock.data.storage.event_loop import EventLoopThread, acquire
from penstock.data.storage.remote_errors import file_changed
from penstock.data.storage.remote_file import query_async
from penstock.data.storage.retries import Retries, TransientError

AHEAD = 64
"""Files that are requested before the one that is read has been read."""
AHEAD_NBYTES = 64 << 20
"""Of these files, if all are as large as the largest one so far; some are requested however large they are."""
_AHEAD_AT_FIRST = 32
"""Files that are requested while nobody knows how large they are."""
_LEAST_AHEAD = 4


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A remote file, and how it is fetched."""

    url: str
    retries: Retries
    nbytes: int
    """The most bytes that are fetched by one request."""
    cache: DiskCache | None = None
    version: FileVersion | None = None
    """As the folder's listing has it: what is taken from the cache, without a request. None looks it up."""

    def kept(self) -> ObjectStart | None:
        """Return what the cache has of the listed version; None if nothing."""
        if self.cache is None or self.version is None or not _is_kept(self.cache, self.url, self.version):
            return None
        return ObjectStart(self.version, None)


@dataclass(frozen=True, slots=True)
class ObjectStart:
    """What was fetched of a file."""

    version: FileVersion
    data: bytes | None
    """Its bytes, at most as many as were requested; None where the cache has a copy."""


class BatchChain:
    """Batches whose files are requested one batch after the other, and how large their files are."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches: list[ObjectBatch] = []
        self.largest_nbytes = 0

    def start_more(self) -> None:
        """Start requests until there are as many as there may be; called with the lock."""
        largest = self.largest_nbytes
        room = min(AHEAD, max(_LEAST_AHEAD, AHEAD_NBYTES // largest) if largest else _AHEAD_AT_FIRST)
        for batch in self.batches:
            room -= batch.start_some(room)


class ObjectBatch:
    """Files that the thread which enters it is about to read; see the module.

    `start` may be called in another thread. After it, the batch has to be entered or closed.

    Args:
        requests: in the order in which they are read; a file may come several times.
    """

    def __init__(self, requests: Iterable[ObjectRequest]) -> None:
        self._waiting = deque(requests)
        self._uses = Counter(self._waiting)
        self._started: dict[ObjectRequest, Future[ObjectStart]] = {}
        self._loop_thread: EventLoopThread | None = None
        self._outer: ObjectBatch | None = None
        self._chain: BatchChain | None = None
        self._work: list[Future[None]] = []

    def start(self, chain: BatchChain | None = None) -> None:
        """Request its files, as many as there may be, but first those of the batches of `chain` started before."""
        if self._chain is None and self._waiting:
            self._loop_thread = acquire()
            self._chain = chain or BatchChain()
            known = (min(one.nbytes, one.version.nbytes) for one in self._uses if one.version is not None)
            with self._chain.lock:
                self._chain.largest_nbytes = max((self._chain.largest_nbytes, *known))
                self._chain.batches.append(self)
        if self._chain is not None:
            with self._chain.lock:
                self._chain.start_more()

    def __enter__(self) -> ObjectBatch:
        self._outer = getattr(_entered, "batch", None)
        self.start()
        _entered.batch = self
        return self

    def __exit__(self, *_: object) -> None:
        _entered.batch, self._outer = self._outer, None
        try:
            for future in self._work:
                future.result()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what is under way and not read."""
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is None or self._chain is None or loop_thread.pid != os.getpid():
            return
        with self._chain.lock:
            self._chain.batches.remove(self)
            self._waiting.clear()
        for future in self._started.values():
            future.cancel()
        self._started.clear()
        loop_thread.release()

    def take(self, request: ObjectRequest) -> ObjectStart | None:
        """Return what is fetched of a file, as soon as it is there; None if the batch does not have it."""
        chain, loop_thread = self._chain, self._loop_thread
        if chain is None or loop_thread is None or loop_thread.pid != os.getpid() or not self._uses[request]:
            return None
        with chain.lock:
            future = self._started.get(request) or self._start(request)  # it is read earlier than the batch has it
            self._uses[request] -= 1
            if not self._uses[request]:
                del self._started[request]
        try:
            found = future.result()
        finally:
            future.cancel()  # has an effect only after an interrupt
            with chain.lock:
                chain.start_more()
        if found.data is not None:
            chain.largest_nbytes = max(chain.largest_nbytes, len(found.data))
        return found

    def run(self, work: Callable[[], None]) -> bool:
        """Run some work in another thread, and wait for it when the batch is left; return False if it cannot be."""
        loop_thread = self._loop_thread
        if loop_thread is None or loop_thread.pid != os.getpid():
            return False
        self._work.append(loop_thread.start(asyncio.to_thread(work)))
        return True

    def start_some(self, room: int) -> int:
        """Start requests until `room` files are under way or not read; return how many are. Called with the lock."""
        while self._waiting and len(self._started) < room:
            request = self._waiting.popleft()
            if self._uses[request] and request not in self._started:
                self._start(request)
        return len(self._started)

    def _start(self, request: ObjectRequest) -> Future[ObjectStart]:
        assert self._loop_thread is not None
        future = self._started[request] = self._loop_thread.start(_fetch(self._loop_thread, request))
        return future


_entered = threading.local()


def fetch(request: ObjectRequest) -> ObjectStart:
    """Return what is fetched of a file: by the batch that this thread has entered, or by a request now."""
    batch: ObjectBatch | None = getattr(_entered, "batch", None)
    found = batch.take(request) if batch is not None else None
    found = found or request.kept()
    if found is not None:
        return found
    loop_thread = acquire()
    try:
        return loop_thread.call(_fetch(loop_thread, request))
    finally:
        loop_thread.release()


def keep(work: Callable[[], None]) -> None:
    """Do what keeps a file that was fetched: beside the rest of the batch that this thread has entered, or now."""
    batch: ObjectBatch | None = getattr(_entered, "batch", None)
    if batch is None or not batch.run(work):
        work()


async def _fetch(loop_thread: EventLoopThread, request: ObjectRequest) -> ObjectStart:
    url, retries, cache = request.url, request.retries, request.cache
    if cache is None:
        return await query_async(loop_thread, url, retries, lambda backend: _fetch_start(backend, request))
    listed = request.version
    if listed is not None and listed.nbytes <= request.nbytes:
        return await query_async(loop_thread, url, retries, partial(_fetch_version, request=request, version=listed))
    version = await query_async(loop_thread, url, retries, lambda backend: backend.file_version(url))
    if version.nbytes > request.nbytes:
        return ObjectStart(version, b"")
    if _is_kept(cache, url, version):
        return ObjectStart(version, None)
    return await query_async(loop_thread, url, retries, lambda backend: _fetch_version(backend, request, version))


def _is_kept(cache: DiskCache, url: str, version: FileVersion) -> bool:
    return cache.has(cache.copy_name(url, version), version.nbytes)


async def _fetch_start(backend: Backend, request: ObjectRequest) -> ObjectStart:
    version, data = await backend.read_start(request.url, request.nbytes)
    if request.version is not None and not version.is_same(request.version):
        raise file_changed(request.url)
    _check_length(len(data), min(version.nbytes, request.nbytes) if data else 0)
    return ObjectStart(version, data)


async def _fetch_version(backend: Backend, request: ObjectRequest, version: FileVersion) -> ObjectStart:
    if not version.nbytes:
        return ObjectStart(version, b"")
    async with aclosing(backend.read(request.url, 0, version.nbytes, version)) as parts:  # type: ignore[type-var]
        data = b"".join([part async for part in parts])
    _check_length(len(data), version.nbytes)
    return ObjectStart(version, data)


def _check_length(nbytes: int, expected: int) -> None:
    if nbytes != expected:
        raise TransientError(f"an answer of {expected} bytes ended {expected - nbytes} early")
