"""Local files that one process reads anywhere, from any thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from penstock.core.errors import SourceError

_Result = TypeVar("_Result")
_MOST = 64


class OwnedDescriptor:
    """A descriptor, closed with the last reference: a thread may read by it while another one lets go of it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, _close, number)


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


class OpenDescriptors:
    """Opens files as they are read. The first ones stay open; the others are opened for each read.

    What cannot be read raises SourceError, with the place.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Return bytes of a file: fewer where it ends."""
        return self._call(path, offset, lambda descriptor: os.pread(descriptor, nbytes, offset))

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        """Fill a buffer, and return how many bytes there were."""
        return self._call(path, offset, lambda descriptor: os.preadv(descriptor, [buffer], offset))

    def _call(self, path: str, offset: int, function: Callable[[int], _Result]) -> _Result:
        try:
            descriptor = self._open.get(path)
            if descriptor is not None:
                return function(descriptor)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            keeps = len(self._open) < _MOST and self._open.setdefault(path, descriptor) == descriptor
            try:
                return function(descriptor)
            finally:
                if not keeps:
                    os.close(descriptor)
        except OSError as error:
            raise SourceError(f"{path} cannot be read at byte {offset}: {error}") from error

    def close(self) -> None:
        """Close them."""
        while self._open:
            os.close(self._open.popitem()[1])
