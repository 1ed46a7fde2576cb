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
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

_ONE = 1 << 48
"""The fixed point of rates."""

_ROUNDS = 6
_MOST_BLOCKS = 2048
"""Blocks that are kept, of 1 to 9 KiB each: samplers may ask for positions in any order."""

_ASKED_OFTEN = 4
"""Numbers of samples are computed one by one until so many of a block were asked for, and then for the whole block."""

_PHASE, _BASE, _EPOCH, _PASS = range(4)
"""What a hash is for: no two uses share one."""


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
        return [(time * rate + offset) // _ONE for rate, offset in zip(self.rates, self.offsets, strict=True)]

    def sources(self, block: int) -> np.ndarray:
        """Return the sources of a block in their order, int64[samples of the block]."""
        sizes = np.subtract(self.counts(block + 1), self.counts(block))
        return _shuffled(np.repeat(np.arange(len(sizes)), sizes), _hash(self.salt, block))

    def block_at(self, place: int) -> int:
        """Return the block that has the sample after `place` samples of this phase."""
        block = place // self.block_time  # off by as many blocks as sources are ahead or behind in all
        while sum(self.counts(block)) > place:
            block -= 1
        while sum(self.counts(block + 1)) <= place:
            block += 1
        return block

    def place_of(self, source: int, number: int) -> int:
        """Return how many samples of this phase come before sample `number` of a source."""
        needed = (number + 1) * _ONE - self.offsets[source]
        block = -(-needed // (self.block_time * self.rates[source])) - 1
        before = self.counts(block)
        return sum(before) + int(np.flatnonzero(self.sources(block) == source)[number - before[source]])

    def counts_at(self, place: int) -> list[int]:
        """Return how many of the first `place` samples of this phase are of each source."""
        block = self.block_at(place)
        before = self.counts(block)
        inside = np.bincount(self.sources(block)[: place - sum(before)], minlength=len(before))
        return [one + int(more) for one, more in zip(before, inside, strict=True)]


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
        first = [Fraction(weight) for weight in weights]
        self._add_phase(first, 0)
        if stop == "all_exhausted_without_replacement":
            self._length = self._leave_out(first, deque(changes), limits or sizes)
        else:
            for position, later in changes:
                self._add_phase(later, position)
            self._length = length or self._end(limits or sizes, min if stop == "first_exhausted" else max)
            self._phases = [phase for phase in self._phases if phase.start < self._length]
        last = self._phases[-1]
        inside = last.counts_at(self._length - last.start)
        self.counts = tuple(before + more for before, more in zip(last.taken, inside, strict=True))
        """Samples of each source in an epoch."""
        self._starts = [phase.start for phase in self._phases]
        self._blocks: dict[tuple[int, int, int], _Block] = {}

    def __len__(self) -> int:
        return self._length

    def _add_phase(self, weights: Sequence[Fraction], start: int) -> None:
        total, number = sum(weights), len(self._phases)
        rates = tuple(max(1, round(weight / total * _ONE)) if weight else 0 for weight in weights)
        offsets = tuple(_hash(self._seed, _PHASE, number, source) % _ONE for source in range(len(weights)))
        salt = _hash(self._seed, _BASE, number)
        taken = self._taken(start) if self._phases else (0,) * len(weights)
        self._phases.append(_Phase(start, taken, rates, offsets, salt, self._block_time))

    def _taken(self, position: int) -> tuple[int, ...]:
        """Return how many samples of each source come before a position of the last phase."""
        last = self._phases[-1]
        return tuple(map(sum, zip(last.taken, last.counts_at(position - last.start), strict=True)))

    def _end(self, sizes: Sequence[int], which: Callable[[list[int]], int]) -> int:
        """Return where the first or the last source has given all of its samples."""
        ends = []
        for source, size in enumerate(sizes):
            phase = [phase for phase in self._phases if phase.taken[source] < size][-1]
            if phase.rates[source]:
                ends.append(phase.start + phase.place_of(source, size - 1 - phase.taken[source]) + 1)
        if not ends or (which is max and len(ends) < len(sizes)):
            raise OptionError(
                "this mixture has no end: by the last weights of its schedule no more samples come of a source that it "
                'waits for; give it a weight, or use stop="never" with a length'
            )
        return which(ends)

    def _leave_out(
        self, weights: list[Fraction], changing: deque[tuple[int, list[Fraction]]], sizes: Sequence[int]
    ) -> int:
        """Add the phases of a mixture that leaves out sources when they have ended; return where the last one ends."""
        left = {*range(len(sizes))}
        while True:
            phase = self._phases[-1]
            ends = [
                (phase.start + phase.place_of(one, sizes[one] - 1 - phase.taken[one]) + 1, one)
                for one in left
                if phase.rates[one]
            ]
            end, first = min(ends)
            if changing and changing[0][0] < end:
                end, weights = changing.popleft()
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
            self._add_phase([weight if one in left else Fraction(0) for one, weight in enumerate(weights)], end)

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
        sources = phase.sources(block)[: end - phase.start - first]
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


def _hash(*words: int) -> int:
    """Return 64 random bits that depend on all words and their order (splitmix64's mixing, Steele et al. 2014)."""
    state = 0
    for word in words:
        state = _mixed((state ^ word) + 0x9E3779B97F4A7C15)
    return state


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
    draws = _mixed_array(
        np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    )
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
