"""A remote file, read in order: ranges of it are fetched side by side, ahead of the reader.

    ranges      of 8 MiB, at multiples of it; the reader gets the bytes of one as they arrive
    ahead       one more range while the first is read, then 4: reading only a header fetches two ranges
    cut         after a response that ends early, the rest of the range is requested
    failed      requests that may succeed later are repeated, see `Retries`; others raise `SourceError` at once
    changed     size and ETag (or time) are recorded when the file is opened; another version is an error, never a mix

At most 1 + 4 ranges are in memory. Requests are made in the process's `EventLoopThread`; the reader only waits.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.core.errors import SourceError
from penstock.core.urls import redact_url
from penstock.data.storage.backend import Backend, FileVersion
from penstock.data.storage.backends import get_backend
from penstock.data.storage.event_loop import EventLoopThread, acquire
from penstock.data.storage.retries import Retries, RetryBudget, TransientError

RANGE_NBYTES = 8 << 20
AHEAD = 4
_WITHOUT_RANGES_NBYTES = 256 << 20
_PROGRESS_NBYTES = 64 << 10
_COALESCE_S = 0.02
"""How long a read waits for all of its bytes before it returns fewer."""
_MAX_LOOKUPS = 32
"""Files whose versions are requested at the same time."""

_Result = TypeVar("_Result")
_INHERITED: list[Any] = []


def file_versions(urls: Sequence[str], retries: Retries) -> list[FileVersion]:
    """Return the files' sizes and versions; several are requested concurrently."""
    return each(urls, retries, lambda backend, url: backend.file_version(url))


def each(urls: Sequence[str], retries: Retries, ask: Callable[[Backend, str], Awaitable[_Result]]) -> list[_Result]:
    """Return what `ask` returns of each URL; several are asked for concurrently.

    Raises:
        SourceError: one does not exist, or cannot be read.
        ExtraError: a package is missing.
    """
    if not urls:  # no reason to start a thread
        return []
    loop_thread, lookups = acquire(), asyncio.Semaphore(_MAX_LOOKUPS)

    async def ask_one(url: str) -> _Result:
        async with lookups:
            return await query_async(loop_thread, url, retries, lambda backend: ask(backend, url))

    futures = [loop_thread.start(ask_one(url)) for url in urls]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        loop_thread.release()


def open_remote(
    url: str, version: FileVersion, retries: Retries, *, range_nbytes: int = RANGE_NBYTES, ahead: int = AHEAD
) -> RemoteFile:
    """Return the file, to be read from its beginning. No request is made before the first read."""
    if not version.has_ranges:
        if version.nbytes > _WITHOUT_RANGES_NBYTES:
            raise SourceError(
                f"{redact_url(url)}: the server supports no ranges, and the file of {version.nbytes} bytes is larger "
                f"than the {_WITHOUT_RANGES_NBYTES} that are read whole; copy it to a disk, or to a server with ranges"
            )
        range_nbytes = max(version.nbytes, 1)
    return RemoteFile(acquire(), url, version, retries, range_nbytes, ahead)


class _Range:
    """A range of the file, and how many of its bytes have arrived."""

    def __init__(self, start: int, end: int, arrived: threading.Condition) -> None:
        self.start = start
        self.data = bytearray(end - start)
        self.filled = 0
        self.needed = 0
        """How many bytes the reader waits for; it is not woken for fewer."""
        self.error: BaseException | None = None
        self.future: Future[None] | None = None
        self._arrived = arrived

    def is_ready(self) -> bool:
        """Return whether the needed bytes have arrived, or never will."""
        return self.filled >= self.needed or self.error is not None

    def add(self, data: bytes) -> None:
        """Store bytes that have arrived; those beyond the range are dropped."""
        count = min(len(data), len(self.data) - self.filled)
        self.data[self.filled : self.filled + count] = data[:count]
        with self._arrived:
            self.filled += count
            if self.filled >= self.needed or self.filled == len(self.data):
                self._arrived.notify_all()

    def end(self, future: Future[None]) -> None:
        """Record that no more bytes will arrive."""
        error = SourceError("the connection was closed") if future.cancelled() else future.exception()
        with self._arrived:
            self.error = error
            self._arrived.notify_all()


class RemoteFile(io.RawIOBase):
    """A remote file. Used by one thread; a forked child continues with new connections."""

    def __init__(
        self,
        loop_thread: EventLoopThread,
        url: str,
        version: FileVersion,
        retries: Retries,
        range_nbytes: int,
        ahead: int,
    ) -> None:
        super().__init__()
        self._loop_thread = loop_thread
        self._url = url
        self._version = version
        self._retries = retries
        self._range_nbytes = range_nbytes
        self._ahead = ahead
        self._ahead_now = 1
        self._last = 0
        self._position = 0
        self._ranges: dict[int, _Range] = {}
        self._arrived = threading.Condition()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset. Requests under way are kept if they lie just ahead of it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._version.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; less at the end of a range, before an error, and where the rest does not arrive at once."""
        if self.closed:
            raise ValueError("read of a closed file")
        view = memoryview(buffer).cast("B")
        if self._position >= self._version.nbytes or not len(view):
            return 0
        here = self._fetch(self._position // self._range_nbytes)
        offset = self._position - here.start
        with self._arrived:
            here.needed = min(offset + len(view), len(here.data))
            if not self._arrived.wait_for(here.is_ready, _COALESCE_S):
                here.needed = offset + 1
                self._arrived.wait_for(here.is_ready)
        if here.filled <= offset:
            self._drop(lambda _: True)
            raise here.error or SourceError(f"{redact_url(self._url)}: a range ended early")
        count = min(len(view), here.filled - offset)
        view[:count] = memoryview(here.data)[offset : offset + count]
        self._position += count
        return count

    def arrives_within(self, start: int, timeout_s: float) -> bool:
        """Return whether all bytes from `start` to the end have arrived, or do within `timeout_s`."""
        numbers = range(start // self._range_nbytes, -(-self._version.nbytes // self._range_nbytes))
        if self._loop_thread.pid != os.getpid() or any(number not in self._ranges for number in numbers):
            return False
        rest = [self._ranges[number] for number in numbers]
        with self._arrived:
            return self._arrived.wait_for(lambda: all(one.filled == len(one.data) for one in rest), timeout_s)

    def close(self) -> None:
        """End the requests that are under way."""
        if self.closed:
            return
        super().close()
        if self._loop_thread.pid == os.getpid():
            self._drop(lambda _: True)
            self._loop_thread.release()

    def _fetch(self, number: int) -> _Range:
        """Return range `number`, requested or arrived, and request those after it."""
        if self._loop_thread.pid != os.getpid():
            _INHERITED.append((self._loop_thread, self._ranges))
            self._loop_thread, self._ranges, self._arrived = acquire(), {}, threading.Condition()
        if number == self._last + 1:
            self._ahead_now = self._ahead
        elif number not in self._ranges:
            self._ahead_now = min(1, self._ahead)
        self._last = number
        self._drop(lambda other: not number <= other <= number + self._ahead)
        count = -(-self._version.nbytes // self._range_nbytes)
        for target in range(number, min(number + self._ahead_now + 1, count)):
            if target not in self._ranges:
                self._ranges[target] = self._start_fetch(target)
        return self._ranges[number]

    def _start_fetch(self, number: int) -> _Range:
        start = number * self._range_nbytes
        new = _Range(start, min(start + self._range_nbytes, self._version.nbytes), self._arrived)
        # The coroutine references the range, not this file: a file without other references must be finalized.
        new.future = self._loop_thread.start(_fill(self._loop_thread, self._url, new, self._version, self._retries))
        new.future.add_done_callback(new.end)
        return new

    def _drop(self, is_unwanted: Callable[[int], bool]) -> None:
        for number in [number for number in self._ranges if is_unwanted(number)]:
            future = self._ranges.pop(number).future
            if future is not None:
                future.cancel()


async def _fill(loop_thread: EventLoopThread, url: str, span: _Range, version: FileVersion, retries: Retries) -> None:
    """Fetch a range, with as many retries as the budget allows."""
    budget, counted = RetryBudget(retries), 0
    while span.filled < len(span.data):
        try:
            backend = get_backend(loop_thread, url, retries.stall_s)
            start, end = span.start + span.filled, span.start + len(span.data)
            async with aclosing(backend.read(url, start, end, version)) as parts:  # type: ignore[type-var]
                async for data in parts:
                    span.add(data)
                    if span.filled - counted >= _PROGRESS_NBYTES:
                        budget.progress()
                        counted = span.filled
                    if span.filled == len(span.data):
                        break
            if span.filled < len(span.data):
                raise TransientError(f"an answer of {end - start} bytes ended {end - span.start - span.filled} early")
        except TransientError as error:
            await _wait_to_retry(url, budget, error)


async def _wait_to_retry(url: str, budget: RetryBudget, error: TransientError) -> None:
    wait_s = budget.wait_s(error)
    if wait_s is None:
        raise SourceError(
            f"{redact_url(url)} cannot be read: {error.reason}; that was attempt {budget.failures}, and the last that "
            "retries= and timeout_s= allow"
        ) from error
    await asyncio.sleep(wait_s)


async def query_async(
    loop_thread: EventLoopThread, url: str, retries: Retries, ask: Callable[[Backend], Awaitable[_Result]]
) -> _Result:
    """Return what `ask` returns of a URL's backend; called again as long as it may succeed."""
    budget = RetryBudget(retries)
    while True:
        try:
            return await ask(get_backend(loop_thread, url, retries.stall_s))
        except TransientError as error:
            await _wait_to_retry(url, budget, error)
