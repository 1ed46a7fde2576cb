"""A remote file, read in order: ranges of it are fetched side by side, ahead of the reader.

    ranges      of 8 MiB, at multiples of it; the reader gets the bytes of one as they come, not when it is whole
    ahead       one more is under way while the first is read, and 4 after that: who looks at a header fetches two
    cut         an answer that ends early is asked for again from where it broke off
    failed      what may pass is tried again, see `Retries`; what will not is a `SourceError` at once
    changed     size and ETag (or time) are noted when it is opened: another version is an error, never a mixture

At most 1 + 4 ranges are in memory. Requests are made in the process's `Line`; the reader only waits.
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
from penstock.feed.sources.remote_failures import shown
from penstock.feed.sources.remote_line import Line, hold
from penstock.feed.sources.remote_wires import Stamp, Wire, connected
from penstock.feed.sources.retries import Patience, Retries, TransientError

RANGE_NBYTES = 8 << 20
AHEAD = 4
_WITHOUT_RANGES_NBYTES = 256 << 20
_PROGRESS_NBYTES = 64 << 10
_MOMENT_S = 0.02
_QUESTIONS = 32
"""About files' sizes, at the same time."""

_Result = TypeVar("_Result")
_INHERITED: list[Any] = []


def stamps(urls: Sequence[str], retries: Retries) -> list[Stamp]:
    """Return the files' sizes and versions; some are asked for side by side.

    Raises:
        SourceError: one is not there, or cannot be read.
        ExtraError: a package is missing.
    """
    if not urls:  # nothing to begin a thread for
        return []
    line, turns = hold(), asyncio.Semaphore(_QUESTIONS)
    futures = [line.start(_stamp(line, url, retries, turns)) for url in urls]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        line.let_go()


def find(url: str, retries: Retries) -> list[str]:
    """Return the URLs of all files below a folder, in order."""
    return _asked(url, retries, lambda wire: wire.find(url))


def glob(url: str, retries: Retries) -> list[str]:
    """Return the URLs that a pattern matches, in order."""
    return _asked(url, retries, lambda wire: wire.glob(url))


def open_remote(
    url: str, known: Stamp, retries: Retries, *, range_nbytes: int = RANGE_NBYTES, ahead: int = AHEAD
) -> RemoteFile:
    """Return the file, to be read from its beginning. Nothing is asked for before the first read.

    Raises:
        SourceError: the server cannot give parts of it, and it is too large to be held in memory.
    """
    if not known.has_ranges:
        if known.nbytes > _WITHOUT_RANGES_NBYTES:
            raise SourceError(
                f"{shown(url)}: the server gives no ranges, and the file of {known.nbytes} bytes is larger than the "
                f"{_WITHOUT_RANGES_NBYTES} that are read whole; copy it to a disk, or to a server that knows Range"
            )
        range_nbytes = max(known.nbytes, 1)
    return RemoteFile(hold(), url, known, retries, range_nbytes, ahead)


class _Range:
    """Some bytes of the file, and how many have come."""

    def __init__(self, start: int, end: int, arrived: threading.Condition) -> None:
        self.start = start
        self.data = bytearray(end - start)
        self.filled = 0
        self.wanted = 0
        """What the reader waits for; it is not woken for less."""
        self.error: BaseException | None = None
        self.future: Future[None] | None = None
        self._arrived = arrived

    def is_ready(self) -> bool:
        """Say whether what is wanted has come, or never will."""
        return self.filled >= self.wanted or self.error is not None

    def add(self, piece: bytes) -> None:
        """Take what has come; anything beyond the range is left out."""
        count = min(len(piece), len(self.data) - self.filled)
        self.data[self.filled : self.filled + count] = piece[:count]
        with self._arrived:
            self.filled += count
            if self.filled >= self.wanted or self.filled == len(self.data):
                self._arrived.notify_all()

    def end(self, future: Future[None]) -> None:
        """Take note that no more will come."""
        error = SourceError("the connection was closed") if future.cancelled() else future.exception()
        with self._arrived:
            self.error = error
            self._arrived.notify_all()


class RemoteFile(io.RawIOBase):
    """A remote file. Used by one thread; in a forked child it goes on with connections of its own."""

    def __init__(self, line: Line, url: str, known: Stamp, retries: Retries, range_nbytes: int, ahead: int) -> None:
        super().__init__()
        self._line = line
        self._url = url
        self._stamp = known
        self._retries = retries
        self._range_nbytes = range_nbytes
        self._ahead = ahead
        self._reach = 1
        self._last = 0
        self._position = 0
        self._ranges: dict[int, _Range] = {}
        self._arrived = threading.Condition()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place. What is under way is kept if it lies just ahead of there."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stamp.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; with less at the end of a range, before an error, and where more does not come at once.

        Raises:
            SourceError: it could not be read, or is not what it was.
        """
        if self.closed:
            raise ValueError("read of a closed file")
        view = memoryview(buffer).cast("B")
        if self._position >= self._stamp.nbytes or not len(view):
            return 0
        here = self._fetched(self._position // self._range_nbytes)
        offset = self._position - here.start
        with self._arrived:
            here.wanted = min(offset + len(view), len(here.data))
            if not self._arrived.wait_for(here.is_ready, _MOMENT_S):
                here.wanted = offset + 1
                self._arrived.wait_for(here.is_ready)
        if here.filled <= offset:
            self._drop(lambda _: True)
            raise here.error or SourceError(f"{shown(self._url)}: a range ended early")
        count = min(len(view), here.filled - offset)
        view[:count] = memoryview(here.data)[offset : offset + count]
        self._position += count
        return count

    def has_rest(self, start: int, timeout_s: float) -> bool:
        """Say whether all from `start` on is here, or comes within `timeout_s`."""
        numbers = range(start // self._range_nbytes, -(-self._stamp.nbytes // self._range_nbytes))
        if self._line.pid != os.getpid() or any(number not in self._ranges for number in numbers):
            return False
        rest = [self._ranges[number] for number in numbers]
        with self._arrived:
            return self._arrived.wait_for(lambda: all(one.filled == len(one.data) for one in rest), timeout_s)

    def close(self) -> None:
        """End the requests that are under way."""
        if self.closed:
            return
        super().close()
        if self._line.pid == os.getpid():
            self._drop(lambda _: True)
            self._line.let_go()

    def _fetched(self, number: int) -> _Range:
        """Return range `number`, on its way or here, and see to it that those after it are on their way."""
        if self._line.pid != os.getpid():
            _INHERITED.append((self._line, self._ranges))
            self._line, self._ranges, self._arrived = hold(), {}, threading.Condition()
        if number == self._last + 1:
            self._reach = self._ahead
        elif number not in self._ranges:
            self._reach = min(1, self._ahead)
        self._last = number
        self._drop(lambda other: not number <= other <= number + self._ahead)
        count = -(-self._stamp.nbytes // self._range_nbytes)
        for wanted in range(number, min(number + self._reach + 1, count)):
            if wanted not in self._ranges:
                self._ranges[wanted] = self._begun(wanted)
        return self._ranges[number]

    def _begun(self, number: int) -> _Range:
        start = number * self._range_nbytes
        new = _Range(start, min(start + self._range_nbytes, self._stamp.nbytes), self._arrived)
        # The work knows the range and not this file, so that a file nobody holds any more is closed.
        new.future = self._line.start(_filled(self._line, self._url, new, self._stamp, self._retries))
        new.future.add_done_callback(new.end)
        return new

    def _drop(self, is_unwanted: Callable[[int], bool]) -> None:
        for number in [number for number in self._ranges if is_unwanted(number)]:
            future = self._ranges.pop(number).future
            if future is not None:
                future.cancel()


async def _filled(line: Line, url: str, wanted: _Range, known: Stamp, retries: Retries) -> None:
    """Fetch a range, in as many attempts as it needs and is given."""
    patience, marked = Patience(retries), 0
    while wanted.filled < len(wanted.data):
        try:
            wire = connected(line, url, retries.stall_s)
            start, end = wanted.start + wanted.filled, wanted.start + len(wanted.data)
            async with aclosing(wire.read(url, start, end, known)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    wanted.add(piece)
                    if wanted.filled - marked >= _PROGRESS_NBYTES:
                        patience.progress()
                        marked = wanted.filled
                    if wanted.filled == len(wanted.data):
                        break
            if wanted.filled < len(wanted.data):
                raise TransientError(
                    f"an answer of {end - start} bytes ended {end - wanted.start - wanted.filled} early"
                )
        except TransientError as trouble:
            await _pause(url, patience, trouble)


async def _pause(url: str, patience: Patience, trouble: TransientError) -> None:
    wait_s = patience.wait_s(trouble)
    if wait_s is None:
        raise SourceError(
            f"{shown(url)} cannot be read: {trouble.reason}; that was attempt {patience.failures}, and the last that "
            "retries= and timeout_s= allow"
        ) from trouble
    await asyncio.sleep(wait_s)


def _asked(url: str, retries: Retries, question: Callable[[Wire], Awaitable[_Result]]) -> _Result:
    line = hold()
    try:
        return line.call(_answered(line, url, retries, question))
    finally:
        line.let_go()


async def _stamp(line: Line, url: str, retries: Retries, turns: asyncio.Semaphore) -> Stamp:
    async with turns:
        return await _answered(line, url, retries, lambda wire: wire.stamp(url))


async def _answered(line: Line, url: str, retries: Retries, question: Callable[[Wire], Awaitable[_Result]]) -> _Result:
    patience = Patience(retries)
    while True:
        try:
            return await question(connected(line, url, retries.stall_s))
        except TransientError as trouble:
            await _pause(url, patience, trouble)
