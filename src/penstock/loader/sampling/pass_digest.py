"""PassDigest: the digest of what one rank's loop has been handed, pass by pass, and its values at some batches.

Where batches are cut from blocks of indices, they are only counted, and a block is hashed when it has been handed out
or somebody asks. Other batches are kept as they are, and hashed some thousand indices at a time. What is pending at the
end of a short pass is hashed when somebody asks, for there may be a thousand passes a second. Of a stream there are no
indices: its digest is of the positions of its shards, as its state has them, where the digest is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from penstock.core.stats import IndexDigest
from penstock.loader.sampling.index_digest import bytes_of, digest_after, joined

_INDICES_AT_ONCE = 1 << 15
_BATCHES_AT_ONCE = 64
"""What a loop was handed is hashed rarely: the call costs more than the indices, and cools the step's caches."""

_MOST_MARKS = 128

_SHORT = 1024
"""Indices that may be pending after a pass."""

_UNKNOWN = "the sampler gives objects that cannot be compared"


class DigestLog:
    """The digests of one loader: at powers of two of batches, and where each pass was left."""

    def __init__(self) -> None:
        self._marks: list[IndexDigest | PassDigest] = []
        self.current: PassDigest | None = None

    def begin(self, epoch: int, start: int = 0, batches: int = 0, digest: int = 0) -> PassDigest:
        """Return the digest of a pass that begins; the arguments are as in `IndexDigest`."""
        if self.current is not None:
            self.current.leave()
            if self.current.is_pending:
                self._keep(self.current)
        self.current = PassDigest(self._keep, epoch, start=start, batches=batches, digest=digest)
        return self.current

    def digests(self) -> tuple[IndexDigest, ...]:
        """Return those kept, and the last one as it is now. Any thread may call it at any time."""
        latest = [self.current] if self.current is not None else []
        found = (one.latest() if isinstance(one, PassDigest) else [one] for one in [*self._marks, *latest])
        return tuple(_most_telling([*dict.fromkeys(itertools.chain.from_iterable(found))]))

    @property
    def reason(self) -> str:
        """Why the pass begun last has no digest; empty if it has."""
        return self.current.why_unknown() if self.current is not None else ""

    def _keep(self, mark: IndexDigest | PassDigest) -> None:
        marks = self._marks
        if mark in marks[-1:]:
            return
        marks.append(mark)
        if len(marks) >= 2 * _MOST_MARKS:
            self._marks = _most_telling(marks)


_Mark = TypeVar("_Mark", IndexDigest, "IndexDigest | PassDigest")


def _most_telling(marks: list[_Mark]) -> list[_Mark]:
    """Return as many as are kept: those within earlier passes go first, and then the earliest passes."""
    left_over = len(marks) - _MOST_MARKS
    if left_over <= 0:
        return marks
    inner = (at for at, one in enumerate(marks) if not one.is_end and one.epoch != marks[-1].epoch)
    dropped = set(itertools.islice(inner, left_over))
    return [one for at, one in enumerate(marks) if at not in dropped][-_MOST_MARKS:]


class PassDigest:
    """The digest of one pass. Written by the iterating thread only.

    Args:
        keep: is given what is worth keeping.
        epoch: the arguments are as in `IndexDigest`.
        start: where the digest begins.
        batches: handed out already.
        digest: of them.
    """

    def __init__(
        self, keep: Callable[[IndexDigest], None], epoch: int, *, start: int, batches: int, digest: int
    ) -> None:
        self._keep = keep
        self.epoch = epoch
        self._start = start
        self.reason = ""
        self._held: tuple[int, int, _Batches | _Drawn] = (digest, batches, _Batches())
        """The digest, the batches in it, and batches handed out since: replaced as a whole, for other threads."""
        self._of_stream = batches
        """Batches of a stream, whose digest is of the positions that were kept."""
        self._room = 0
        """How many batches are hashed together; 0 before the first."""
        self.is_end = False
        self.is_pending = False
        """Whether the pass has been left, and its last batches are not hashed."""
        self._left: list[IndexDigest] | None = None
        """What `latest` has found of such a pass."""

    def add(self, batch: Any) -> None:
        """Count a batch of indices: an array, tensor or list; None for indices that cannot be compared."""
        if batch is None:
            self.reason = _UNKNOWN
            return
        pending: Any = self._held[2]
        pending.append(batch)
        self._room = self._room or _room_for(batch)
        if len(pending) >= self._room:
            self._hash()

    def draw(self, blocks: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
        """Yield blocks of indices, of which batches of `size` are handed out in order; `count` says how many are."""
        for block in blocks:
            if len(self._held[2]):
                self._hash()
            digest, batches, pending = self._held
            self._held = (digest, batches, _Drawn((*pending.rest(), block), size))
            yield block

    def count(self) -> None:
        """Count a batch of the blocks that were drawn."""
        self._held[2].handed_out += 1

    def add_of_stream(self, position: Callable[[], Any]) -> None:
        """Count a batch of a stream; `position` returns where the stream is, where that is kept."""
        self._of_stream += 1
        if _is_kept(self._of_stream) and not self.reason:
            self.set_position(position())
            self._mark()

    def set_position(self, position: Any) -> None:
        """Add to the digest that a stream has come to `position`, as plain values."""
        data = None if self.reason else bytes_of(position)
        if data is not None:
            self._held = (digest_after(self._held[0], [data]) or 0, self._of_stream, _Batches())
        elif not self.reason:
            self.reason = "the stream's state holds objects that cannot be compared"

    def leave(self, *, is_end: bool = False) -> None:
        """Keep the digest at the end of the pass, or where it was left."""
        if self.is_end:
            return
        self.is_end = is_end
        pending = self._held[2]
        self.is_pending = len(pending) > 0 and pending.most_indices() <= _SHORT
        if self.is_pending:
            return
        if len(pending):
            self._hash()
        if is_end or self._held[1]:
            self._mark()

    def latest(self) -> list[IndexDigest]:
        """Return what is worth keeping of the batches not hashed yet, and the digest as it is now. For any thread."""
        if self._left is not None:
            return self._left
        is_left = self.is_pending
        marks, digest, batches = self._hashed()
        if self.reason or digest is None or not batches:
            marks = []
        else:
            marks.append(self._as_mark(digest, batches, is_end=self.is_end))
        if is_left:
            self._left = marks
        return marks

    def why_unknown(self) -> str:
        """Return why there is no digest; empty if there is."""
        return self.reason or (_UNKNOWN if self._hashed()[1] is None else "")

    def state(self) -> list[int] | None:
        """Return `start`, `batches` and `digest` of a pass that resumes here; None where there is no digest."""
        _, digest, batches = self._hashed()
        return None if self.reason or digest is None else [self._start, max(self._of_stream, batches), digest]

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _hashed(self) -> tuple[list[IndexDigest], int | None, int]:
        """Return what is worth keeping of the pending batches, the digest after them (if any), and their number."""
        digest, batches, pending = self._held
        marks: list[IndexDigest] = []
        start, stop = 0, len(pending)
        while start < stop:
            next_kept = 1 << batches.bit_length()
            end = min(stop, start + next_kept - batches)
            for piece in pending.indices(start, end):
                after = digest_after(digest, piece)
                if after is None:
                    return marks, None, batches
                digest = after
            batches, start = batches + end - start, end
            if batches == next_kept:
                marks.append(self._as_mark(digest, batches))
        return marks, digest, batches

    def _hash(self) -> None:
        pending = self._held[2]
        if isinstance(pending, _Batches) and pending:
            self._room = _room_for(pending[-1])
        marks, digest, batches = self._hashed()
        if digest is None:
            self.reason = self.reason or _UNKNOWN
        for mark in marks:
            self._keep(mark)
        self._held = (digest or 0, batches, pending.after_all())

    def _mark(self) -> None:
        if not self.reason:
            self._keep(self._as_mark(*self._held[:2], is_end=self.is_end))

    def _as_mark(self, digest: int, batches: int, *, is_end: bool = False) -> IndexDigest:
        return IndexDigest(epoch=self.epoch, batches=batches, digest=f"{digest:016x}", start=self._start, is_end=is_end)


def _room_for(batch: Any) -> int:
    return min(_BATCHES_AT_ONCE, max(1, _INDICES_AT_ONCE // max(1, len(batch))))


def _is_kept(batches: int) -> bool:
    return batches & (batches - 1) == 0


class _Batches(list[Any]):
    """Batches of indices that were handed out."""

    handed_out: int  # as of `_Drawn`

    def indices(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the indices of some of the batches."""
        yield joined(self[start:stop])

    def most_indices(self) -> int:
        """Return how many indices are in memory for this."""
        return sum(map(len, self))

    def rest(self) -> tuple[np.ndarray, ...]:
        """Return what was drawn and not handed out."""
        return ()

    def after_all(self) -> _Batches:
        """Return what is pending when all of it has been hashed."""
        return _Batches()


class _Drawn:
    """Blocks of indices, and how many batches of them have been handed out."""

    def __init__(self, blocks: tuple[np.ndarray, ...], size: int) -> None:
        self._blocks = blocks
        self._size = size
        self._most = -(-self.most_indices() // size)
        self.handed_out = 0

    def __len__(self) -> int:
        return min(self.handed_out, self._most)

    def most_indices(self) -> int:
        """Return how many indices are in memory for this."""
        return sum(map(len, self._blocks))

    def indices(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the indices of some of the batches."""
        start, stop = start * self._size, stop * self._size
        for block in self._blocks:
            if start < len(block) and stop > 0:
                yield block[max(0, start) : stop]
            start, stop = start - len(block), stop - len(block)

    def rest(self) -> tuple[np.ndarray, ...]:
        """Return what was drawn and not handed out."""
        return tuple(self.indices(len(self), self._most))

    def after_all(self) -> _Drawn:
        """Return what is pending when all of it has been hashed."""
        return _Drawn(self.rest(), self._size)
