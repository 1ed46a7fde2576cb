"""One batch on its way: from what the workers report of its pieces to what is handed out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from penstock.core.errors import TransportError
from penstock.feed.collate import merge
from penstock.feed.counters import Counters
from penstock.feed.stream_cursor import Used
from penstock.feed.transport import codec
from penstock.feed.transport.ring import Ring, Slot, SlotState
from penstock.feed.transport.room import Room
from penstock.feed.workers.base import Report


@dataclass(slots=True, eq=False)
class Batch:
    """A batch under way, or ready."""

    number: int
    indices: Any
    slot: Slot | None
    worker: int | None = None
    left: int = 0
    """Pieces that have not come back."""
    parts: dict[int, Report] = field(default_factory=dict)
    """Reports of parts, by first row."""
    stops: dict[int, int] = field(default_factory=dict)
    envelope: bytes | None = None
    made: Any = None
    """The batch itself, made in the training process."""
    is_made: bool = False
    error: Any = None
    error_row: int = 0
    void: bool = False
    """There will be no such batch: the stream has ended, or all its samples were skipped."""
    cancelled: bool = False
    state: Any = None
    """Of its lane after it."""
    has_ended: bool = False
    """Its lane has nothing left."""
    samples: int = 0
    nbytes: int = 0
    work_ns: int = 0
    evidence: str = ""

    @property
    def used(self) -> Used:
        """What handing it out uses up."""
        return Used(self.number, self.worker or 0, self.state, self.has_ended)

    @property
    def parts_disagree(self) -> bool:
        """Whether its parts have samples of different moulds."""
        specs = [report.part[0] for report in self.parts.values() if report.part is not None]
        return any(spec != specs[0] for spec in specs)

    def take(self, report: Report, row: int, ring: Ring) -> None:
        """Take what a piece has brought.

        Args:
            report: of the piece.
            row: the first one of the piece.
            ring: which the slot is of.
        """
        self.state = report.state
        if report.error is not None:
            if self.error is None or row < self.error_row:
                self.error, self.error_row = report.error, row
        elif report.ended:
            self.void = self.has_ended = True
        elif report.empty:
            self.void = True
        elif report.piece is not None and report.piece.part is not None:
            self._take_part(report, row, ring)
        elif report.is_batch:
            self.made, self.is_made = report.batch, True
            self.samples, self.nbytes = report.samples, report.nbytes
        else:
            self._take_whole(report, ring)

    def _take_part(self, report: Report, row: int, ring: Ring) -> None:
        if report.needed:
            try:
                ring.require(report.needed)
            except TransportError as error:
                self.error = error
        self.parts[row] = report
        self.samples += report.samples
        self.nbytes = max(self.nbytes, report.nbytes)

    def _take_whole(self, report: Report, ring: Ring) -> None:
        self.envelope = report.envelope
        self.samples, self.nbytes = report.samples, report.nbytes
        if report.oversize is not None:
            self.drop(ring)
            try:
                self.slot = ring.adopt(report.oversize, report.nbytes)
            except TransportError as error:
                self.error = error

    def settle(self, ring: Ring) -> None:
        """Be ready: all pieces are back, and the slot is committed, or free where it holds nothing."""
        if self.void or (self.envelope is not None and codec.is_inband(self.envelope)):
            self.drop(ring)
        elif self.slot is not None and self.error is None and self.slot.state is SlotState.FILLING:
            ring.commit(self.slot, self.nbytes)

    def drop(self, ring: Ring) -> None:
        """Give the slot back, unused."""
        if self.slot is not None:
            ring.release(self.slot)
            self.slot = None

    def raise_error(self, ring: Ring) -> None:
        """Raise what was raised in making it, if anything was."""
        if self.error is None:
            return
        self.drop(ring)
        if isinstance(self.error, Exception):
            raise self.error
        self.error.reraise()

    def open(self, ring: Ring, counters: Counters) -> Any:
        """Return what is handed out: its tensors are views of the slot, which is free when the last of them dies."""
        counters.batches += 1
        counters.samples += self.samples
        counters.nbytes += self.nbytes
        if self.is_made:
            return self.made
        if self.slot is None:
            assert self.envelope is not None
            counters.inband_batches += 1
            return codec.decode(self.envelope, None)
        memory = _lend(ring, self.slot, self.nbytes)
        if not self.parts:
            assert self.envelope is not None
            return codec.decode(self.envelope, memory)
        counters.split_batches += 1
        parts = [part for row in sorted(self.parts) if (part := self.parts[row].part) is not None]
        try:
            return merge(parts, Room(memory))
        except Exception:
            # What no worker could collate by itself fails here; it is told as a worker's failure is.
            error = ExceptionWrapper(where=f"in DataLoader worker process {self.worker or 0}")
        error.reraise()
        raise AssertionError  # `reraise` has raised


def _lend(ring: Ring, slot: Slot, nbytes: int) -> np.ndarray:
    memory = ring.lend(slot)
    if ring.is_tight():
        ring.copied_out += 1
        return memory[:nbytes].copy()
    return memory
