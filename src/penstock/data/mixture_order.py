"""Which sample of which source stands at position i of a mixture: a function of the seed, the epoch and i alone.

Time runs through a mixture at one sample a unit. After a time t, source k has given floor(t * w_k + u_k) samples, where
w_k is its part of all weights and u_k in [0, 1) comes from the seed. So a source is within one or two
samples of its weight at the end of every block of 1024 units (fewer in small mixtures), and how many came before a
block is one multiplication: nothing is drawn in advance, and nothing is stored. Within a block the order is random.

Weights that change, by a schedule or because a source has ended and is left out, begin a new phase. An epoch
has another order within each block, and continues every source where the epoch before has left it.

All arithmetic is on integers, so every machine has the same order.
"""

from __future__ import annotations

import hashlib
import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np

from penstock.core.errors import OptionError

Stop = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never"]

_BLOCK = 1024
"""Units of time in a block, and about as many samples, unless the sources are small."""

_FEWEST_BLOCKS = 32
"""Blocks in all samples of the sources, where these are small, so that weights hold over a part of them."""

_BITS = 48
_ONE = 1 << _BITS
"""The fixed point of rates."""

_ROUNDS = 6
_MOST_BLOCKS = 2048
"""Blocks that are kept, of 1 to 9 KiB each: samplers may ask for positions in any order."""

_ASKED_OFTEN = 4
"""Numbers of samples are computed one by one until so many of a block were asked for, and then for the whole block."""

_PHASE, _BASE, _EPOCH, _PASS = range(4)
"""What a hash is for: no two uses share one."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, which splitmix64 counts by."""


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a mixture during which weights stay the same."""

    start: int
    """The position at which it begins."""
    taken: tuple[int, ...]
    """Samples of each source before it."""
    rates: tuple[int, ...]
    offsets: tuple[int, ...]
    salt: int
    block_time: int

    def counts(self, block: int) -> list[int]:
        """Return how many samples of each source come before a block of this phase."""
        time = block * self.block_time
        return [
            time * rate + offset >> _BITS if rate else 0 for rate, offset in zip(self.rates, self.offsets, strict=True)
        ]

    def sources(self, block: int, before: list[int]) -> np.ndarray:
        """Return the sources of a block in their order, int64[samples of the block]; `before` are its `counts`."""
        sizes = [end - begin for begin, end in zip(before, self.counts(block + 1), strict=True)]
        return _shuffled(np.repeat(np.arange(len(sizes)), sizes), _hash(self.salt, block))

    def block_at(self, place: int) -> int:
        """Return the block that has the sample after `place` samples of this phase."""
        block = place // self.block_time  # off by as many blocks as sources are ahead or behind in all
        while sum(self.counts(block)) > place:
            block -= 1
        while sum(self.counts(block + 1)) <= place:
            block += 1
        return block

    def counts_at(self, place: int) -> list[int]:
        """Return how many of the first `place` samples of this phase are of each source."""
        block = self.block_at(place)
        before = self.counts(block)
        return _counted(before, self.sources(block, before)[: place - sum(before)])

    def end(self, numbers: Mapping[int, int], which: Callable[[Iterable[int]], int]) -> tuple[int, int, list[int]]:
        """Find the first (or last) of some samples.

        Args:
            numbers: one of each source that is asked for, which has a rate.
            which: `min` or `max`.

        Returns:
            Its source, how many samples of this phase there are to its end, and how many of each source.
        """
        blocks = {  # in which each is
            source: ((number + 1) * _ONE - self.offsets[source] - 1) // (self.block_time * self.rates[source])
            for source, number in numbers.items()
        }
        block = which(blocks.values())
        before = self.counts(block)
        sources = self.sources(block, before)
        by_source = np.argsort(sources, kind="stable")
        here = [source for source in numbers if blocks[source] == block]
        nth = np.array([numbers[source] - before[source] for source in here])
        place = which(by_source[np.searchsorted(sources[by_source], here) + nth].tolist())
        return int(sources[place]), sum(before) + place + 1, _counted(before, sources[: place + 1])


def _counted(before: list[int], sources: np.ndarray) -> list[int]:
    """Return how many samples there are of each source, after those before and these."""
    return _sums(before, np.bincount(sources, minlength=len(before)).tolist())


@dataclass(slots=True)
class _Block:
    """A block of an epoch."""

    first: int
    """The position of its first sample in its phase."""
    sources: np.ndarray
    """Of its samples in their order, unsigned integers [samples]."""
    begins: list[int]
    """How many samples each source has given before it, in all epochs."""
    asked: int = 0
    numbers: np.ndarray | None = None
    """Of its samples in their sources, int64[samples], when many were asked for."""


class MixtureOrder:
    """The order of a mixture; arguments are as for `penstock.mix`, but for these two.

    Args:
        sizes: samples of each source, at least one.
        limits: samples of each source after which it has ended, by `stop`; as many as it has, without.

    Raises:
        OptionError: it would have no end.

    >>> order = MixtureOrder([3, 1], [6, 6], seed=0, stop="first_exhausted", length=None, shuffle=False)
    >>> len(order), order.counts
    (7, (6, 1))
    """

    def __init__(
        self,
        weights: Sequence[float | Fraction],
        sizes: Sequence[int],
        *,
        seed: int,
        stop: Stop,
        length: int | None,
        shuffle: bool,
        limits: Sequence[int] | None = None,
        schedule: Mapping[int, Sequence[float | Fraction]] | None = None,
    ) -> None:
        changes = sorted((position, [Fraction(one) for one in later]) for position, later in (schedule or {}).items())
        arguments = (weights, sizes, seed, stop, length, shuffle, changes, *(limits or ()))
        self.digest = hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]
        """Of all arguments."""
        self._seed = seed
        self._sizes = np.array(sizes, np.int64)
        self._shuffle = shuffle
        self._block_time = min(_BLOCK, max(1, sum(sizes) // _FEWEST_BLOCKS))
        self._phases: list[_Phase] = []
        first = _integers(weights)
        self._add_phase(first, 0, [0] * len(first))
        if stop == "all_exhausted_without_replacement":
            changing = deque((position, _integers(later)) for position, later in changes)
            self._length = self._leave_out(first, changing, limits or sizes)
        else:
            for position, later in changes:
                self._add_phase(_integers(later), position, self._taken(position))
            self._length = length or self._end(limits or sizes, min if stop == "first_exhausted" else max)
            self._phases = [phase for phase in self._phases if phase.start < self._length]
        if self._length > sys.maxsize:
            raise OptionError(
                f"an epoch of this mixture would have about 10**{math.log10(self._length):.0f} samples, and a "
                f"length is at most {sys.maxsize}; lower length= or epochs=, raise the smallest weights, or use "
                "another rule, stop="
            )
        last = self._phases[-1]
        self.counts = tuple(_sums(last.taken, last.counts_at(self._length - last.start)))
        """Samples of each source in an epoch."""
        self._starts = [phase.start for phase in self._phases]
        self._blocks: dict[tuple[int, int, int], _Block] = {}

    def __len__(self) -> int:
        return self._length

    def _add_phase(self, weights: Sequence[int], start: int, taken: Sequence[int]) -> None:
        """Add a phase that begins at a position, when so many samples of each source have been taken."""
        total, number = sum(weights), len(self._phases)
        rates = tuple(_rate(weight, total) if weight else 0 for weight in weights)
        offsets = (_hashes(len(weights), self._seed, _PHASE, number) % np.uint64(_ONE)).tolist()
        salt = _hash(self._seed, _BASE, number)
        self._phases.append(_Phase(start, tuple(taken), rates, tuple(offsets), salt, self._block_time))

    def _taken(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position of the last phase."""
        last = self._phases[-1]
        return _sums(last.taken, last.counts_at(position - last.start))

    def _end(self, limits: Sequence[int], which: Callable[[Iterable[int]], int]) -> int:
        """Return where the first or the last source has given all of its samples."""
        phases = {}  # in which each ends
        for source, limit in enumerate(limits):
            number = max(number for number, phase in enumerate(self._phases) if phase.taken[source] < limit)
            if self._phases[number].rates[source]:
                phases[source] = number
        if not phases or (which is max and len(phases) < len(limits)):
            raise OptionError(
                "this mixture has no end: by the last weights of its schedule no more samples come of a source that it "
                'waits for; give it a weight, or use stop="never" with a length'
            )
        number = which(phases.values())
        phase = self._phases[number]
        last = {source: limits[source] - 1 - phase.taken[source] for source in phases if phases[source] == number}
        return phase.start + phase.end(last, which)[1]

    def _leave_out(self, weights: Sequence[int], changing: deque[tuple[int, list[int]]], limits: Sequence[int]) -> int:
        """Add the phases of a mixture that leaves out sources when they have ended; return where the last one ends."""
        left = {*range(len(limits))}
        while True:
            phase = self._phases[-1]
            last = {one: limits[one] - 1 - phase.taken[one] for one in left if phase.rates[one]}
            first, place, counts = phase.end(last, min)
            end, taken = phase.start + place, _sums(phase.taken, counts)
            if changing and changing[0][0] < end:
                end, weights = changing.popleft()
                taken = self._taken(end)
            else:
                left.remove(first)
                if not left:
                    return end
            while not any(weights[one] for one in left):
                if not changing:
                    raise OptionError(
                        "by the schedule of this mixture some sources never end: their last weight is 0, and no other "
                        "source is left"
                    )
                _, weights = changing.popleft()  # earlier than it says, since nothing else is left
            self._add_phase([weight if one in left else 0 for one, weight in enumerate(weights)], end, taken)

    def locate(self, index: int, epoch: int) -> tuple[int, int]:
        """Return the source of the sample at a position of an epoch, and its number in the source."""
        number = bisect_right(self._starts, index) - 1
        phase = self._phases[number]
        place = index - phase.start
        key = epoch, number, place // phase.block_time
        block = self._blocks.get(key)
        if block is None or not block.first <= place < block.first + len(block.sources):
            block = self._block(number, phase.block_at(place), epoch)
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[key] = block
        at = place - block.first
        source = int(block.sources[at])
        if block.numbers is None and block.asked >= _ASKED_OFTEN:
            block.numbers = self._numbers_of_block(block)
        if block.numbers is not None:
            return source, int(block.numbers[at])
        block.asked += 1
        given = block.begins[source] + int(np.count_nonzero(block.sources[:at] == source))
        return source, int(self._numbers(source, given, 1)[0])

    def _block(self, number: int, block: int, epoch: int) -> _Block:
        phase = self._phases[number]
        before = phase.counts(block)
        first = sum(before)
        end = self._phases[number + 1].start if number + 1 < len(self._phases) else self._length
        # Every epoch has the same samples of each source: those that the end cuts off are the same in each.
        sources = phase.sources(block, before)[: end - phase.start - first]
        if epoch:
            sources = _shuffled(sources, _hash(self._seed, _EPOCH, epoch, number, block))
        begins = [
            epoch * count + taken + given for count, taken, given in zip(self.counts, phase.taken, before, strict=True)
        ]
        return _Block(first, sources.astype(np.min_scalar_type(len(before))), begins)

    def _numbers_of_block(self, block: _Block) -> np.ndarray:
        numbers = np.empty(len(block.sources), np.int64)
        for source in np.unique(block.sources).tolist():
            mine = block.sources == source
            numbers[mine] = self._numbers(source, block.begins[source], int(mine.sum()))
        return numbers

    def _numbers(self, source: int, begin: int, count: int) -> np.ndarray:
        """Return which samples of a source are its `count` next ones when it has given `begin`, over all passes."""
        size = int(self._sizes[source])
        parts = []
        while count:
            which, at = divmod(begin, size)
            part = np.arange(at, at + min(count, size - at))
            if self._shuffle:
                part = _permuted(part, size, _hash(self._seed, _PASS, source, which))
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return np.concatenate(parts)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_blocks": {}}


def _integers(weights: Sequence[float | Fraction]) -> list[int]:
    """Return integers of the same proportions."""
    exact = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [weight.numerator * (scale // weight.denominator) for weight in exact]


def _rate(weight: int, total: int) -> int:
    """Return a weight's part of all, as a fixed point number: rounded as Python does, but more than 0."""
    whole, rest = divmod(weight << _BITS, total)
    return whole + (2 * rest > total or (2 * rest == total and whole % 2 == 1)) or 1


def _sums(ones: Sequence[int], others: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip(ones, others, strict=True)]


def _hash(*words: int) -> int:
    """Return 64 random bits that depend on all words and their order (splitmix64's mixing, Steele et al. 2014)."""
    state = 0
    for word in words:
        state = _mixed((state ^ word) + _GOLDEN)
    return state


def _hashes(count: int, *words: int) -> np.ndarray:
    """Return `_hash(*words, number)` for each number of range(count), uint64[count]."""
    numbers = np.arange(count, dtype=np.uint64)
    return _mixed_array((numbers ^ np.uint64(_hash(*words))) + np.uint64(_GOLDEN))


def _mixed(word: int) -> int:
    word &= (1 << 64) - 1
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    word = (word ^ word >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return word ^ word >> 31


def _mixed_array(words: np.ndarray) -> np.ndarray:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _shuffled(values: np.ndarray, key: int) -> np.ndarray:
    draws = _mixed_array(np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))
    return values[np.argsort(draws)]  # no two draws are equal, so every way to sort them gives the same order


@lru_cache(maxsize=64)
def _small_permutation(size: int, key: int) -> np.ndarray:
    """Return a permutation of range(size), int64[size]: a network of few bits is not random enough."""
    return _shuffled(np.arange(size), key)


def _permuted(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return where a random permutation of range(size) takes some of its numbers, int64[numbers].

    A Feistel network permutes the next larger range of 2 ** (2 * half) numbers; what it takes out of range(size) goes
    through it again (Black and Rogaway 2002, "cycle walking"). So a permutation of any size takes no memory.

    >>> sorted(_permuted(np.arange(5), 5, 7).tolist())
    [0, 1, 2, 3, 4]
    """
    if size <= _BLOCK:
        return np.asarray(_small_permutation(size, key)[numbers])
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(_hash(key, turn)) for turn in range(_ROUNDS)]
    found = numbers.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        one = found[outside]
        left, right = one >> half, one & mask
        for turn in keys:
            left, right = right, left ^ (_mixed_array(right ^ turn) & mask)
        found[outside] = left << half | right
        outside = found >= np.uint64(size)
    return found.astype(np.int64)
