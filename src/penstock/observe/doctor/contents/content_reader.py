"""Reads samples to compare their content: no more than a number of samples, of bytes and of seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from penstock.observe.doctor.contents.origins import Indices, Origin
from penstock.observe.doctor.contents.sample_content import SampleContent, content_of
from penstock.observe.doctor.contents.stream_samples import StreamSamples
from penstock.observe.doctor.contents.untransformed import untransformed
from penstock.observe.doctor.thresholds import THRESHOLDS

_RUN = 16
"""Samples in a row: rows that were copied often stand side by side."""

_MOST_FAILURES = 8
_USUAL = 32
_SPREAD = 8


class ContentReader:
    """Reads samples, each once, and remembers what they hold.

    Args:
        seconds: for about how long.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self._samples = self._nbytes = self._failures = 0
        self._digests: dict[int, dict[int, bytes]] = {}
        self._repeated: dict[bytes, tuple[int, bool]] = {}
        """What is known of content that several samples have: its information, and whether it has fractions."""
        self._seen: set[bytes] = set()
        self._usual: list[int] = []
        """The information of some samples."""
        self._datasets: dict[int, Any] = {}  # keeps the ids unique
        self._same_data: dict[tuple[int, int], bool] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read."""
        return (
            self._samples >= THRESHOLDS.compared_samples
            or self._nbytes >= THRESHOLDS.compared_nbytes
            or self._failures >= _MOST_FAILURES
            or self._clock() > self._until
        )

    @property
    def left_s(self) -> float:
        """How many seconds are left; none below 0."""
        return max(0.0, self._until - self._clock())

    def read_first(self, places: Iterable[tuple[Any, int]]) -> None:
        """Read these samples, given by dataset and index."""
        for dataset, index in places:
            if self.is_over:
                return
            self._read(dataset, index)

    def read_in_turns(self, pools: Iterable[Iterable[Origin]]) -> None:
        """Read samples of each pool, by turns, until the limits are reached or all have been read."""
        orders = [_order(tuple(origins)) for origins in pools]
        while orders and not self.is_over:
            orders = [order for order in orders if self._read_some(order)]

    def digests(self, dataset: Any) -> dict[int, bytes]:
        """Return the digests of what was read of a dataset, by index."""
        return {index: digest for index, digest in self._digests.get(id(dataset), {}).items() if digest}

    def is_telling(self, digest: bytes) -> bool:
        """Return whether several samples have this digest, and content that is not equal by chance."""
        information, has_fractions = self._repeated.get(digest, (0, False))
        least: float = THRESHOLDS.telling_fractions_nbytes if has_fractions else THRESHOLDS.telling_nbytes
        if len(self._usual) == _USUAL:  # what is equal by chance, as short lines are, is simpler than most
            usual = THRESHOLDS.usual_information * statistics.median(self._usual)
            least = min(least, max(usual, THRESHOLDS.telling_usual_nbytes))
        return information >= least

    def is_same_data(self, one: Any, other: Any) -> bool:
        """Return whether two datasets return the same samples, but for their transforms."""
        if one is other:
            return True
        key = id(one), id(other)
        if key not in self._same_data:
            self._same_data[key] = self._compare(one, other)
        return self._same_data[key]

    def _compare(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        try:
            size = len(one)
            if size != len(other):
                return False
        except (TypeError, NotImplementedError):
            return False
        indices = np.unique(np.linspace(0, size - 1, _SPREAD).astype(np.int64)).tolist() if size else []
        telling = 0
        for index in indices:
            first, second = self._read(one, index), self._read(other, index)
            if not first or first != second:
                return False
            telling += self.is_telling(first)
        return telling * 2 > len(indices)

    def _read_some(self, order: Iterator[tuple[Any, int]]) -> bool:
        """Read a run of samples; return whether there may be more."""
        for _ in range(_RUN):
            place = next(order, None)
            if place is None or self.is_over:
                return False
            self._read(*place)
        return True

    def _read(self, dataset: Any, index: int) -> bytes:
        """Return the digest of a sample; nothing where it has none."""
        known = self._digests.setdefault(id(dataset), {})
        self._datasets[id(dataset)] = dataset
        if index not in known:
            self._samples += 1
            content = self._make(dataset, index)
            known[index] = content.digest if content is not None else b""
            if content is None:
                self._failures += 1
            else:
                self._nbytes += content.nbytes
                self._note_digest(content)
        return known[index]

    def _note_digest(self, content: SampleContent) -> None:
        most = THRESHOLDS.telling_nbytes
        if content.digest not in self._seen:
            self._seen.add(content.digest)
            if len(self._usual) < _USUAL:
                self._usual.append(content.information(most))
        elif content.digest not in self._repeated:
            self._repeated[content.digest] = content.information(most), content.has_fractions

    def _make(self, dataset: Any, index: int) -> SampleContent | None:
        for is_plain in (True, False):  # a dataset may need its transforms
            with ExitStack() as stack:
                if is_plain:
                    stack.enter_context(untransformed(dataset))
                try:
                    bulk = getattr(dataset, "__getitems__", None)
                    content = content_of(bulk([index])[0] if bulk is not None else dataset[index], index)
                except Exception:
                    continue
            if content is not None:
                return content
        return None


def _order(origins: tuple[Origin, ...]) -> Iterator[tuple[Any, int]]:
    if len(origins) == 1 and isinstance(stream := origins[0].dataset, StreamSamples):
        return ((stream, number) for number in stream.numbers())
    return _spread(origins)


def _spread(origins: tuple[Origin, ...]) -> Iterator[tuple[Any, int]]:
    """Yield each sample once: runs of samples from everywhere, in an order that is always the same."""
    starts = [(part, start) for part, origin in enumerate(origins) for start in range(0, len(origin.indices), _RUN)]
    for number in np.random.default_rng(0).permutation(len(starts)):
        part, start = starts[number]
        run: Indices = origins[part].indices[start : start + _RUN]
        for index in run.tolist():
            yield origins[part].dataset, index
