"""ChunkOrder: the order of one pass of `ChunkShuffle`, computed: which index stands at any place of it.

    slots      the samples, chunk after chunk, in the random order of chunks, lane after lane
    blocks     of `window` chunks of a lane. A block's samples are sorted by a hash of their slots when one of them is
               asked for, and kept until others are
    stretches  of places: batch k is cut from lane k mod lanes for as many rounds as no lane ends; then a batch is
               filled up from the next lane, and rounds go on with the lanes that are left

What is held is some numbers for each chunk and lane, and the blocks in use: nothing for each sample.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import numpy as np

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014 (the finalizer of SplitMix64)."""
_STEP = np.uint64(0x9E3779B97F4A7C15)

_PLACE_BITS = np.uint64(38)
"""Of a sort key: which of the samples that are drawn at once; the others are random. All are different, so that any
sort has one result."""


_FOR_EVER = np.iinfo(np.int64).max


class ChunkOrder:
    """The indices of a pass; the arguments are those of `ChunkShuffle`.

    The orders of two epochs have nothing to do with each other.

    >>> order = ChunkOrder(np.array([0, 4, 8]), batch_size=2, lanes=1, window=1, seed=0, epoch=0)
    >>> sorted(order.at(np.arange(8)).tolist()), {int(index) // 4 for index in order.at(np.arange(4))} in ({0}, {1})
    ([0, 1, 2, 3, 4, 5, 6, 7], True)
    """

    def __init__(self, starts: np.ndarray, *, batch_size: int, lanes: int, window: int, seed: int, epoch: int) -> None:
        sizes = np.diff(starts)
        chunks = np.random.default_rng([seed & (2**64 - 1), epoch]).permutation(len(sizes))
        chunks = np.concatenate([chunks[lane::lanes] for lane in range(lanes)])
        self._firsts = starts[chunks]
        self._slots = np.append(0, np.cumsum(sizes[chunks]))
        counts = np.array([len(range(lane, len(chunks), lanes)) for lane in range(lanes)], np.int64)
        begins = np.cumsum(counts) - counts
        in_lane = np.arange(len(chunks)) - np.repeat(begins, counts)
        self._blocks = np.append(self._slots[np.flatnonzero(in_lane % window == 0)], self._slots[-1])
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
        self._key = np.frombuffer(key, "<u8").astype(np.uint64)[0]
        self._stretches = _Stretches(self._slots[begins], self._slots[begins + counts], batch_size)
        self._drawn: dict[int, np.ndarray] = {}
        """The indices of the blocks in use, in the order of blocks; below, as arrays."""
        self._held = self._begins = self._indices = np.empty(0, np.int64)

    def __len__(self) -> int:
        return int(self._slots[-1])

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the indices at some places, int64[places] of int64[places]."""
        slots = self._stretches.slots(places)
        blocks = np.searchsorted(self._blocks, slots, "right") - 1
        wanted = sorted({*blocks.tolist()})
        added = [block for block in wanted if block not in self._drawn]
        if added:
            drawn = self._drawn | dict(zip(added, self._shuffled(np.array(added)), strict=True))
            self._drawn = {block: drawn[block] for block in wanted}
            self._held, self._indices = np.array(wanted), np.concatenate([*self._drawn.values()])
            self._begins = np.cumsum([0, *map(len, self._drawn.values())])
        found: np.ndarray = self._indices[
            self._begins[np.searchsorted(self._held, blocks)] + slots - self._blocks[blocks]
        ]
        return found

    def _shuffled(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Return the indices of some blocks, each block's in random order."""
        sizes = self._blocks[blocks + 1] - self._blocks[blocks]
        slots = _ranges(self._blocks[blocks], sizes)
        chunks = np.searchsorted(self._slots, slots, "right") - 1
        indices = self._firsts[chunks] + (slots - self._slots[chunks])
        keys = self._hashed(slots) >> _PLACE_BITS << _PLACE_BITS
        keys |= np.arange(len(keys), dtype=np.uint64)
        spans = [slice(end - size, end) for end, size in zip(np.cumsum(sizes).tolist(), sizes.tolist(), strict=True)]
        for span in spans:
            keys[span].sort()
        places = (keys & ((np.uint64(1) << _PLACE_BITS) - np.uint64(1))).astype(np.int64)
        found = indices[places]
        return [found[span] for span in spans]

    def _hashed(self, slots: np.ndarray) -> np.ndarray:
        mixed = slots.astype(np.uint64) * _STEP + self._key
        for shift, factor in zip((30, 27), _MIX, strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
        found: np.ndarray = mixed ^ (mixed >> np.uint64(31))
        return found


class _Stretches:
    """Which slot stands at a place: batches that are cut from lanes by turns.

    Args:
        begins: the first slot of each lane, int64[lanes].
        ends: the slot after its last.
        batch_size: of the batches.
    """

    def __init__(self, begins: np.ndarray, ends: np.ndarray, batch_size: int) -> None:
        at, left = begins.copy(), ends - begins
        rows: list[np.ndarray] = []
        heads: list[tuple[int, int, int]] = []
        """Of each stretch: its first place, how many lanes it has, and how many slots it takes from each by turns."""
        place = 0

        def add(lanes: Any, block: int, rounds: int) -> None:
            nonlocal place
            rows.append(at[lanes].copy())
            heads.append((place, len(rows[-1]), block))
            at[lanes] += rounds * block
            left[lanes] -= rounds * block
            place += len(rows[-1]) * rounds * block

        turns: deque[int] = deque(np.flatnonzero(left).tolist())
        left[left == 0] = _FOR_EVER
        while turns:
            if rounds := int(left.min()) // batch_size:
                add([*turns], batch_size, rounds)
            room = batch_size
            while room and turns:  # a lane that has ended is followed by the next one in the same batch
                lane = turns.popleft()
                if taken := min(room, int(left[lane])):
                    add(slice(lane, lane + 1), taken, 1)
                    room -= taken
                if left[lane]:
                    turns.append(lane)
                else:
                    left[lane] = _FOR_EVER
        first, width, block = np.array(heads or [(0, 1, 1)], np.int64).T
        self._first, self._width, self._block = first, width, block
        self._row = np.cumsum(width) - width
        self._slots = np.concatenate(rows) if rows else np.zeros(1, np.int64)

    def slots(self, places: np.ndarray) -> np.ndarray:
        """Return the slots at some places, int64[places]."""
        stretch: Any = np.searchsorted(self._first, places, "right") - 1
        if len(stretch) and stretch.min() == stretch.max():
            stretch = stretch[0]  # NumPy divides by a number faster than by an array
        block, width = self._block[stretch], self._width[stretch]
        number, inside = np.divmod(places - self._first[stretch], block)
        rounds, lane = np.divmod(number, width)
        found: np.ndarray = self._slots[self._row[stretch] + lane] + rounds * block + inside
        return found


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return consecutive numbers, `sizes` of them from each of `begins` on.

    >>> _ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(sizes)
    found: np.ndarray = np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
    return found
