"""The samples of one dataset, each made once: looked up in a `SampleFile`, and added to it when they were made.

A sample is only kept if nobody drew from a random generator while it was made. What another program has left in a file
is compared with what the dataset gives now: `_COMPARED` samples, by each process.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from penstock.core.errors import OptionError, SourceError, TransportError
from penstock.core.host import available_nbytes
from penstock.core.private_files import open_file
from penstock.core.random_states import OF_SAMPLES, draw_once, get_states, marks, names_of_drawn, set_states
from penstock.core.shared_bytes import HEAD_NBYTES, SharedBytes, attached_or_new
from penstock.core.shared_segment import memfd_works
from penstock.core.units import size_text, to_nbytes
from penstock.data.sample_cache.sample_bytes import decode, encode, encode_parts
from penstock.data.sample_cache.sample_file import Entry, SampleFile, table_nbytes
from penstock.distributed.machine_sharing import share_on_machine
from penstock.distributed.rank import Distributed

Where = Literal["ram", "disk"]

_COMPARED = 2
"""Samples of a file that each process makes anew and compares."""

_SLOTS = 256
"""Processes that count at a time without two of them writing to the same numbers."""

_HITS, _MISSES, _FULL = range(3)
"""Rows of these numbers."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What a cache has done, in all processes that share it."""

    hits: int
    """Samples that were read from it."""
    misses: int
    """Samples that were made."""
    entries: int
    """Samples that it has."""
    nbytes: int
    """Bytes that they take."""
    limit_nbytes: int
    """Bytes that they may take."""
    full: bool
    """Whether a sample did not fit: from then on no more are added."""


class SampleCache:
    """Samples by number; `open_cache` makes it. A pickle of it is the same cache, on this machine."""

    def __init__(
        self, file: SampleFile, counts: _Counts, places: int, origin: tuple[Any, ...], *, is_on_disk: bool
    ) -> None:
        self._file = file
        self._counts = counts
        self.places = places
        """How many samples there may be."""
        self._origin = origin
        self._is_on_disk = is_on_disk
        self._checked = bytearray(places if is_on_disk else 0)
        """Entries whose CRC this process has compared."""
        self._left_to_compare = _COMPARED if is_on_disk else 0
        self._has_warned = False

    def get(self, index: int, make: Callable[[], Any]) -> Any:
        """Return sample `index`, as `make()` returns it.

        Raises:
            OptionError: it was made with random numbers.
            SourceError: the file has another sample.
            UnpicklableError: it cannot be kept.
        """
        entry = self._file.entry(index)
        content = None if entry is None else self._content(index, entry)
        if content is None:
            return self._made(index, make, entry)
        if self._left_to_compare:
            self._left_to_compare -= 1
            self._compare(index, content, make)
        self._counts.add(_HITS)
        return decode(content)

    def has(self, index: int) -> bool:
        """Return whether a sample is there; it may still be damaged."""
        return self._file.entry(index) is not None

    def keep(self, index: int, sample: Any, entry: Entry | None = None) -> None:
        """Add a sample, if there is room."""
        self._counts.add(_MISSES)
        if self._counts.is_full:
            return
        content = encode_parts(sample, index)
        try:
            fits = self._file.add(index, content, instead_of=entry, has_crc=self._is_on_disk)
        except OSError as error:
            fits = False
            warnings.warn(
                f"{self._file.name} takes no more samples: {error.strerror}; the others are made anew each time",
                stacklevel=2,
            )
        if not fits:
            self._counts.is_full = True

    def info(self) -> CacheInfo:
        """Return what it has done."""
        entries, nbytes = self._file.filled()
        counts = self._counts
        return CacheInfo(*counts.totals(), entries, nbytes, self._file.limit_nbytes, counts.is_full)

    def _content(self, index: int, entry: Entry) -> np.ndarray | None:
        is_checked = self._is_on_disk and not self._checked[index]
        content = self._file.read(entry, is_checked=is_checked)
        if content is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"sample {index} in {self._file.name} is damaged, and made anew", stacklevel=2)
        if is_checked and content is not None:
            self._checked[index] = 1
        return content

    def _made(self, index: int, make: Callable[[], Any], entry: Entry | None) -> Any:
        with self.watching(index, make) as samples:
            samples.append(make())
        self.keep(index, samples[0], entry)
        return samples[0]

    @contextmanager
    def watching(self, name: object, make: Callable[[], Any]) -> Iterator[list[Any]]:
        """Raise at the end if what was appended to the list was made with random numbers.

        A generator's state may have changed for another reason: a first import, another thread. So it is made again.
        """
        if self._counts.is_full:
            yield []
            return
        since = marks()
        made: list[Any] = []
        yield made
        drawn = names_of_drawn(since)
        if not drawn:
            return
        states, is_alone = get_states(), threading.active_count() == 1
        if is_alone:
            draw_once()  # or seeding would not be seen: it would give the same states again
        since = marks()
        is_other = encode(make(), name) != encode(made[0], name)
        again = names_of_drawn(since)
        if is_alone:
            set_states(states)
        if is_other or (again and (is_alone or again == [OF_SAMPLES])):
            raise OptionError(
                f"sample {name} was made with random numbers, and a cache would have the same ones in every epoch. "
                f"Generators that were drawn from or seeded: {', '.join(drawn)}. Cache the dataset without its random "
                "transforms, and apply these after it: in a dataset that returns transform(cached[index]), or as "
                "source.cached(...).map(transform)"
            )

    def _compare(self, index: int, content: np.ndarray, make: Callable[[], Any]) -> None:
        with self.watching(index, make) as samples:
            samples.append(make())
        if encode(samples[0], index) != content.tobytes():
            raise SourceError(
                f"{self._file.name} has another sample {index} than the dataset makes now: its data or its code have "
                "changed since, or it makes another one each time; remove the file, or pass another path"
            )

    def __reduce__(self) -> Any:
        make, *arguments = self._origin
        return make, tuple(arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> SampleCache:
        return self


# ── one cache for all processes ─────────────────────────────────────────────────────────────────────────────


def open_cache(
    where: Where,
    places: int,
    limit: int | str | None,
    path: Any,
    fingerprint: Callable[[], bytes],
    distributed: Distributed = False,
) -> SampleCache:
    """Make or open a cache, see `penstock.cached`; `fingerprint` returns 32 bytes that tell whose samples these are."""
    if where not in ("ram", "disk"):
        raise OptionError(f"a cache is in 'ram' or on 'disk', not in {where!r}")
    if (where == "disk") != (path is not None):
        raise OptionError("a cache on 'disk' needs path=, the file for it, and one in 'ram' has none")
    limit_nbytes = None if limit is None else to_nbytes("limit", limit, least=1)
    if where == "ram":
        if not memfd_works():
            raise OptionError("a cache in 'ram' needs memfd (Linux), which this system lacks; use 'disk' with a path")
        limit_nbytes = limit_nbytes or max(1, available_nbytes() // 2)
        return share_on_machine(partial(_new_in_memory, places, limit_nbytes), fingerprint, distributed)
    path = os.path.abspath(os.fspath(path))
    try:
        return _on_disk(path, places, fingerprint(), limit_nbytes, _Counts())
    except (OSError, ImportError) as error:
        raise OptionError(f"no cache of samples can be made at {path}: {error}; pass another path") from error


def _new_in_memory(places: int, limit_nbytes: int) -> SampleCache:
    try:
        memory = SharedBytes(table_nbytes(places) + limit_nbytes)
    except TransportError as error:
        raise OptionError(
            f"no memory of {size_text(limit_nbytes)} can be shared ({error.__cause__ or error}); lower limit="
        ) from error
    return _in_memory(memory, places, limit_nbytes, _Counts(), begin=True)


def _in_memory(
    memory: SharedBytes, places: int, limit_nbytes: int, counts: _Counts, *, begin: bool = False
) -> SampleCache:
    file = SampleFile(memory.reopen, HEAD_NBYTES, places, f"the cache of {places} samples in memory")
    file.limit_nbytes = limit_nbytes
    if begin:
        file.begin(bytes(32))
    return SampleCache(file, counts, places, (_in_memory, memory, places, limit_nbytes, counts), is_on_disk=False)


def _on_disk(path: str, places: int, fingerprint: bytes, limit_nbytes: int | None, counts: _Counts) -> SampleCache:
    os.close(open_file(path, os.O_RDWR | os.O_CREAT))
    file = SampleFile(partial(open_file, path, os.O_RDWR), 0, places, path)
    file.begin(fingerprint)
    if limit_nbytes is None:
        status = os.statvfs(path)
        limit_nbytes = file.filled()[1] + status.f_bavail * status.f_frsize // 2
    file.limit_nbytes = limit_nbytes
    origin = (_on_disk, path, places, fingerprint, limit_nbytes, counts)
    return SampleCache(file, counts, places, origin, is_on_disk=True)


_counting = threading.Lock()


def _renew_lock() -> None:
    global _counting
    _counting = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_renew_lock)


class _Counts:
    """Hits and misses of all processes, each of which writes to numbers of its own."""

    def __init__(self, memory: SharedBytes | None = None) -> None:
        self._memory = SharedBytes(3 * 8 * _SLOTS) if memory is None else memory
        self._numbers = np.frombuffer(self._memory.memory, np.int64).reshape(3, _SLOTS)

    def add(self, row: int) -> None:
        with _counting:
            self._numbers[row, os.getpid() % _SLOTS] += 1

    def totals(self) -> tuple[int, int]:
        hits, misses = self._numbers[[_HITS, _MISSES]].sum(axis=1).tolist()
        return hits, misses

    @property
    def is_full(self) -> bool:
        return bool(self._numbers[_FULL, 0])

    @is_full.setter
    def is_full(self, value: bool) -> None:
        self._numbers[_FULL, 0] = value

    def __reduce__(self) -> Any:
        return attached_or_new, (_Counts, *self._memory.__reduce__())
