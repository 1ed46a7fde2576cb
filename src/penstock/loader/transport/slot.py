"""A slot: memory for one batch, and the states in which it may be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class PageLock(Protocol):
    """Keeps memory page-locked for a device (see `penstock.device.Registration`, which workers must not import)."""

    def close(self) -> None:
        """Unlock the memory. No copy may be under way."""
        ...


class SlotState(Enum):
    """Who may use a slot: nobody, a worker, nobody yet, the user, copies to a device that are under way."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    HELD = "held"
    COPYING = "copying"


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one batch: `nbytes` bytes at `offset` of segment number `segment`."""

    segment: int
    offset: int
    nbytes: int
    memory: memoryview
    state: SlotState = SlotState.FREE
    used_nbytes: int = 0
    """The most bytes a batch has had here: what the slot really costs: other pages are untouched."""
    page_lock: PageLock | None = None
    """What page-locks its first `locked_nbytes` bytes."""
    locked_nbytes: int = 0
    address: int = 0
    """Of its page-locked memory."""
    place: tuple[bool, int, int, int] = field(init=False)
    """As tasks have it: that there is a slot, its segment, offset and size."""
    is_seen_by_forks: bool = False
    """Whether a process was forked while the user held it, which may read it at any time: it must not be reused."""

    def __post_init__(self) -> None:
        self.place = True, self.segment, self.offset, self.nbytes

    def move(self, to: SlotState, before: SlotState, or_before: SlotState | None = None) -> None:
        """Change state, from one of these only."""
        if self.state is not before and self.state is not or_before:
            raise AssertionError(f"a slot cannot become {to.value} while it is {self.state.value}")
        self.state = to

    def unlock(self) -> None:
        """Unlock its pages, if they are locked."""
        if self.page_lock is not None:
            self.page_lock.close()
            self.page_lock, self.locked_nbytes = None, 0

    def drop_memory(self) -> None:
        """Drop the memory; where the user still views it, it stays alive, pageable."""
        self.unlock()
        self.memory = memoryview(b"")
