"""The first samples of a stream as a dataset that is read in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from penstock.observe.doctor.thresholds import THRESHOLDS


class StreamSamples(Dataset[Any]):
    """The samples of a stream by their number, each of them made when it is first asked for; only the last is kept.

    Args:
        stream: an IterableDataset. It is iterated once, in this process, and never by two iterators at once.

    Example:
        >>> samples = StreamSamples(iter("abc"))
        >>> [samples[number] for number, _ in zip(samples.numbers(), range(2))]
        ['a', 'b']
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.has_ended = False
        self._iterator: Iterator[Any] | None = None
        self._last: tuple[int, Any] = (-1, None)

    def __getitem__(self, number: int) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.stream)
        at, sample = self._last
        if number not in (at, at + 1):
            raise IndexError(f"sample {number} of a stream was asked for after sample {at}")
        if number != at:
            try:
                sample = next(self._iterator)
            except BaseException:  # also one that failed: its iterator makes nothing more
                self.has_ended = True
                raise
            self._last = number, sample
        return sample

    def numbers(self) -> Iterator[int]:
        """Yield 0, 1, ... until reading one has found the stream's end; each is to be read before the next."""
        number = 0
        while not self.has_ended:
            yield number
            number += 1

    @property
    def size(self) -> int:
        """How many samples it has; before its end is known, as many as are compared at most."""
        return self._last[0] + 1 if self.has_ended else THRESHOLDS.compared_samples
