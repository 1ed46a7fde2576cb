"""A random order of samples that are read in chunks: chunks of HDF5, row groups of Parquet.

    chunks     are shuffled, and distributed over lanes, one for each worker
    blocks     of `window` chunks of a lane: their samples are shuffled together
    batches    batch k is cut from lane k mod lanes, so that a worker that gets every lanes-th batch reads the chunks of
               its lane only: each chunk is unpacked once

A window of 1 keeps samples of a chunk together; a larger one mixes more, and a worker caches as many chunks.

Of a pass only what its order is computed from is held, and the blocks in use: nothing for each sample.

    slots      the samples, chunk after chunk, in the random order of chunks, lane after lane
    blocks     of `window` chunks of a lane. A block's samples are sorted by a hash of their slots when one of them is
               asked for, and kept until others are
    stretches  of places: batch k is cut from lane k mod lanes for as many rounds as no lane ends; then a batch is
               filled up from the next lane, and rounds go on with the lanes that are left
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from penstock.core.errors import OptionError

SHUFFLE_BLOCK = 4
"""Chunks whose samples are shuffled together, by default."""

_FIRST, _MOST = 1 << 10, 1 << 15
"""Indices that are computed at once: few for the first batch, and many for NumPy."""


class ChunkShuffle(Sampler[int]):
    """Every sample once, in a random order that reads each chunk once.

    Args:
        starts: where each chunk begins, and at the end the number of samples: `chunk_starts` of a source.
        batch_size: of the batches that will be cut from this order.
        lanes: how many workers get the batches, round-robin; 1 for one worker, or none.
        window: chunks whose samples are shuffled together.
        seed: of the order; None draws one from torch's (or the generator's) random state for every epoch.
        generator: whose random state.

    Example:
        >>> order = ChunkShuffle([0, 4, 8], window=1, seed=0)
        >>> drawn = list(order)
        >>> sorted(drawn), {number // 4 for number in drawn[:4]} in ({0}, {1})
        ([0, 1, 2, 3, 4, 5, 6, 7], True)
    """

    def __init__(
        self,
        starts: Sequence[int] | np.ndarray,
        *,
        batch_size: int = 1,
        lanes: int = 1,
        window: int = SHUFFLE_BLOCK,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if batch_size < 1 or lanes < 1 or window < 1:
            raise OptionError(f"batch_size={batch_size}, lanes={lanes} and window={window} have to be 1 or more")
        self._starts = np.asarray(starts, np.int64)
        self._batch_size = batch_size
        self._lanes = lanes
        self._window = window
        self._seed = seed
        self._generator = generator
        self._epoch = 0

    def __len__(self) -> int:
        return int(self._starts[-1])

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it, each pass is the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn(*self.draw())

    def draw(self) -> tuple[int, int]:
        """Begin a pass; return its seed and its epoch."""
        seed, epoch = self._seed, self._epoch
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        self._epoch += 1
        return seed, epoch

    def next_pass(self) -> dict[str, Any]:
        """Return what the next pass will be drawn from: its epoch, and the state of its generator, if it has one."""
        generator = {} if self._generator is None else {"generator": self._generator.get_state()}
        return {"epoch": self._epoch, **generator}

    def set_next_pass(self, state: dict[str, Any]) -> None:
        """Draw the next pass from what `next_pass` returned."""
        self._epoch = state["epoch"]
        if self._generator is not None and "generator" in state:
            self._generator.set_state(state["generator"])

    @property
    def purpose(self) -> dict[str, int]:
        """The arguments that depend on the loader, of `made_for`."""
        return {"batch_size": self._batch_size, "lanes": self._lanes, "window": self._window}

    def made_for(self, purpose: dict[str, int]) -> ChunkShuffle:
        """Return an order of the same chunks for other batches and lanes."""
        return ChunkShuffle(self._starts, generator=self._generator, **purpose)

    def order(self, seed: int, epoch: int) -> ChunkOrder:
        """Return the order of a seed and an epoch, whose index at any place can be asked for."""
        return ChunkOrder(self._starts, **self.purpose, seed=seed, epoch=epoch)

    def drawn(self, seed: int, epoch: int) -> Iterator[int]:
        """Yield the indices in the order of a seed and an epoch."""
        order, at_once, start = self.order(seed, epoch), _FIRST, 0
        while start < len(self):
            yield from order.at(np.arange(start, min(len(self), start + at_once))).tolist()
            start, at_once = start + at_once, min(_MOST, 2 * at_once)


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
