"""The ring: a loader's slots, from being free to being free again.

    free ──acquire──▶ filling ──commit──▶ ready ──lend──▶ held ──(last view dies)──▶ free
                         │                  │               └─▶ copying ──(fence passes)──┘
                         └──── release ─────┴──free_after──────▶ copying ──(event passes)─┘

Only the training process has a ring, so its states need no lock between processes. A worker receives a slot's place
and never learns its state. A lease is given back by the finalizer of the array under the batch's views, which may
run in any thread and at any allocation: it only appends to a deque, which `acquire` empties.

Slots may be page-locked for a device (`pin`). Copies that the user has started may then still read the slot after its
last view has died, and torch guards only memory of its own allocator. So such a slot is not free before an event
passes that stands for everything the device had been given when the view was found dead (`fence`). What penstock copies
itself is never lent: such a slot is free when the copy's own event has passed (`free_after`).

At most `MOST_PENDING` of these events are left pending: then the oldest is waited for. A host whose steps are a launch
or two would else run as far ahead of the device as there is memory for slots.

A process that the program forks sees held slots, too, and may read them for as long as it lives: such a slot is not
used again. Its memory is given back with the rest of its segment, when both processes have dropped that.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from penstock.core.errors import TransportError
from penstock.core.shared_segment import PAGE, SharedSegment
from penstock.core.stats import RingCounts
from penstock.core.units import round_up, size_text
from penstock.core.walking import walk

GENEROUS_NBYTES = 256 << 20
"""Size of a slot while no batch has shown its size; untouched pages cost nothing."""

MOST_PENDING = 3
"""Events that copies are behind and that have not passed."""

_MODEST_NBYTES = 1 << 20
_GRAIN = 2 << 20


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


class Fence(Protocol):
    """An event of a device (see `penstock.device.Event`, which workers must not import)."""

    def query(self) -> bool:
        """Return whether it has passed."""
        ...

    def synchronize(self) -> None:
        """Wait until it has passed."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


@dataclass(slots=True)
class _Segment:
    segment: SharedSegment
    slots: list[Slot] = field(default_factory=list)


class _Lease(weakref.ref[np.ndarray]):
    """Joins the ring's deque when the array has died: with no line of Python, in which a Ctrl-C would be lost."""

    slot: Slot


_of_parents: list[object] = []
"""Segments of the process that this one was forked from. They are kept: closing one may remove its name."""


class Ring:
    """The slots of one pipeline, grown on demand up to `budget_nbytes`.

    Args:
        make: makes a segment of the given size in bytes.
        budget_nbytes: the most bytes that batches may occupy here at once.
        announce: called with (number, segment) for every segment made, and with (number, None) when it is retired.
        pin: page-locks memory for a device; each slot once, when its first batch shows how much of it is used.
        pin_budget_nbytes: the most bytes that may be page-locked; slots beyond stay pageable.
        fence: returns an event behind all that the device has been given, or None when none can be recorded now; for
            pinned slots that are lent to a user who may start copies of their own.
    """

    def __init__(
        self,
        make: Callable[[int], SharedSegment],
        budget_nbytes: int,
        *,
        announce: Callable[[int, SharedSegment | None], None] = lambda number, segment: None,
        pin: Callable[[memoryview], PageLock | None] | None = None,
        pin_budget_nbytes: int | None = None,
        fence: Callable[[], Fence | None] | None = None,
    ) -> None:
        self._make = make
        self._pin = pin
        self._pin_budget = budget_nbytes if pin_budget_nbytes is None else pin_budget_nbytes
        self._fence = fence
        self._copying: deque[tuple[Fence, Sequence[Slot]]] = deque()
        """Slots that copies read, by the event behind the copies."""
        self._unfenced: list[Slot] = []
        """Slots that copies may read, and no event is behind these yet."""
        self._budget = budget_nbytes
        self.announce = announce
        self._segments: dict[int, _Segment] = {}
        self._free: deque[Slot] = deque()
        self._returned: deque[_Lease] = deque()
        self._leases: dict[Slot, _Lease] = {}
        self._count = 0
        """Of all slots."""
        self._next_number = 0
        self._batch_nbytes = 0
        self._grown = 0
        self._oversize = 0
        self.copied_out = 0
        _rings.add(self)

    def fence_from_now(self, fence: Callable[[], Fence | None]) -> None:
        """Guard the copies that users may start from pinned slots, those that they hold already too."""
        self._fence = fence

    def acquire(self, wanted: int = 4, *, grow: bool = True) -> Slot | None:
        """Take a free slot for filling, adding slots when there is none; None when the budget is used up.

        `wanted` is how many slots the caller expects to have in use; without `grow`, None once so many are, beside
        those whose batches the user holds.
        """
        if self._returned or self._copying or self._unfenced:
            self._take_returned()
        if not grow and self._count_in_use() >= wanted:
            return None
        if not (self._can_fill_free() or self._grow(wanted) or (grow and self._await_copies())):
            return None
        slot = self._free.pop()  # the one used last: its pages are mapped, and perhaps in a cache
        slot.move(SlotState.FILLING, SlotState.FREE)
        return slot

    def can_acquire(self) -> bool:
        """Return whether `acquire` would give a slot."""
        self._take_returned()
        return self._can_fill_free() or self._affordable(1) > 0

    def is_tight(self) -> bool:
        """Return whether the user's held batches leave the pipeline fewer than two slots to work with.

        Slots that copies read are waited for.
        """
        if self._fence is not None:  # a fence that comes one batch later lets the host lead by one more step
            self._take_returned()
        working = self._count_in_use()
        if self._copying or self._unfenced:
            working -= len(self._unfenced) + sum(len(slots) for _, slots in self._copying)
        if working >= 2:
            return False
        self._take_returned()
        return not (self.can_acquire() or self._await_copies())

    def acquire_larger(self, nbytes: int) -> Slot | None:
        """Take a slot of at least `nbytes` bytes; slots made from now on are that large."""
        self._learn_size(nbytes)
        return self.acquire(1)

    def note(self, slot: Slot, nbytes: int) -> None:
        """Record that `slot`, lent before it was filled, holds `nbytes` bytes."""
        if nbytes > slot.used_nbytes:
            slot.used_nbytes = nbytes
        if nbytes > self._batch_nbytes:
            self._learn_size(nbytes)
        if self._pin is not None:
            self._page_lock(slot)

    def commit(self, slot: Slot, nbytes: int) -> None:
        """Record that `slot` now holds a batch of `nbytes` bytes."""
        slot.move(SlotState.READY, SlotState.FILLING)
        if nbytes > slot.used_nbytes or self._pin is not None:
            self.note(slot, nbytes)

    def lend(self, slot: Slot) -> np.ndarray:
        """Return the slot's memory (uint8) for views; the slot is free again when the last of them has died."""
        slot.move(SlotState.HELD, SlotState.READY)
        memory = np.frombuffer(slot.memory, np.uint8)
        lease = self._leases[slot] = _Lease(memory, self._returned.append)
        lease.slot = slot
        return memory

    def free_after(self, slot: Slot, event: Fence) -> None:
        """Free a slot that was not lent when the copy has been made that `event` is behind; the ring closes the event.

        Waits for older copies where too many are pending.
        """
        slot.move(SlotState.COPYING, SlotState.READY)
        self._copying.append((event, (slot,)))
        if len(self._copying) > MOST_PENDING:
            self._end_copies()

    def release(self, slot: Slot) -> None:
        """Free a slot whose batch will not be handed out."""
        slot.move(SlotState.FREE, SlotState.FILLING, SlotState.READY)
        self._reuse(slot)

    def reclaim(self) -> None:
        """Free what an abandoned pass has left: nobody writes to its slots any more, and none will be handed out."""
        for slot in self._all_slots():
            if slot.state in (SlotState.FILLING, SlotState.READY):
                self.release(slot)

    def adopt(self, segment: SharedSegment, nbytes: int) -> Slot:
        """Make a slot of a segment that holds a batch of `nbytes` bytes, because no slot was large enough.

        Raises:
            TransportError: the batch is larger than the ring's whole budget.
        """
        self._oversize += 1
        try:
            self.require(nbytes)
        except TransportError:
            segment.close()
            raise
        number = self._take_number()
        slot = Slot(number, 0, segment.nbytes, segment.memory, SlotState.READY, used_nbytes=nbytes)
        self._segments[number] = _Segment(segment, [slot])
        self._count += 1
        self.announce(number, segment)
        while self._free and self._cost(self._all_slots()) > self._budget:
            self._retire(self._free.popleft())  # the least recently used
        if self._pin is not None:
            self._page_lock(slot)
        return slot

    def require(self, nbytes: int) -> None:
        """Record that batches take `nbytes` bytes; slots made from now on are that large.

        Raises:
            TransportError: that is more than the ring's whole budget.
        """
        if nbytes > self._budget:
            raise TransportError(
                f"a batch of {size_text(nbytes)} does not fit the ring's {size_text(self._budget)} budget; "
                "raise ring_bytes or lower batch_size"
            )
        self._learn_size(nbytes)

    def announce_all(self, announce: Callable[[int, SharedSegment | None], None]) -> None:
        """Announce every segment there is."""
        for number, segment in self._segments.items():
            announce(number, segment.segment)

    def counts(self) -> RingCounts:
        """Return where the slots are. Changes nothing, so any thread may ask while another one iterates."""
        slots = self._all_slots()
        given_back = {lease.slot for lease in walk(self._returned)}
        states = [SlotState.FREE if slot in given_back else slot.state for slot in slots]
        return RingCounts(
            free=states.count(SlotState.FREE),
            filling=states.count(SlotState.FILLING),
            ready=states.count(SlotState.READY),
            held=states.count(SlotState.HELD),
            copying=states.count(SlotState.COPYING),
            segments=len(self._segments),
            nbytes=self._cost(slots),
            pinned_nbytes=sum(slot.locked_nbytes for slot in slots),
            budget_nbytes=self._budget,
            grown=self._grown,
            copied_out=self.copied_out,
            oversize=self._oversize,
        )

    def close(self) -> None:
        """Drop all segments; memory that the user still views lives on until the views die."""
        for segment in self._segments.values():
            segment.segment.close()
            for slot in segment.slots:
                slot.drop_memory()
        self._segments.clear()
        self._free.clear()
        self._copying.clear()
        self._unfenced.clear()
        self._count = 0

    def before_fork(self) -> None:
        """Note for slots that the user holds that another process will see them."""
        for slot, lease in walk(self._leases.items()):
            segment = self._segments.get(slot.segment)
            if lease() is not None and segment is not None and segment.segment.shared:
                slot.is_seen_by_forks = True

    def after_fork_in_child(self) -> None:
        """Leave shared slots to the process that made them; this one makes others."""
        shared = {number for number, segment in self._segments.items() if segment.segment.shared}
        if shared:
            _of_parents.append([self._segments.pop(number) for number in shared])
            self._free = deque(slot for slot in self._free if slot.segment not in shared)
            self._copying.clear()
            self._unfenced.clear()
            self._count = len(self._all_slots())

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take_returned(self) -> None:
        returned = self._returned
        while returned:
            slot = returned.popleft().slot
            del self._leases[slot]
            if slot.segment not in self._segments:  # the ring was closed while the user held the batch
                continue
            if self._fence is not None and slot.page_lock is not None:
                slot.move(SlotState.COPYING, SlotState.HELD)
                self._unfenced.append(slot)
            else:
                slot.move(SlotState.FREE, SlotState.HELD)
                self._reuse(slot)
        if self._copying or self._unfenced:
            self._end_copies()

    def _end_copies(self) -> None:
        """Put one fence behind all copies that have none; free the slots whose copies are over."""
        if self._unfenced:
            assert self._fence is not None
            if (event := self._fence()) is not None:
                self._copying.append((event, self._unfenced))
                self._unfenced = []
        copying = self._copying
        while copying:
            event, slots = copying[0]
            if not event.query():
                if len(copying) <= MOST_PENDING:
                    break
                event.synchronize()
            del copying[0]
            self._free_copied(event, slots)

    def _free_copied(self, event: Fence, slots: Sequence[Slot]) -> None:
        event.close()
        for slot in slots:
            slot.move(SlotState.FREE, SlotState.COPYING)
            self._reuse(slot)

    def _await_copies(self) -> bool:
        """Wait for copies, the oldest first, until a slot is free; return whether one is."""
        while not self._can_fill_free():
            if not self._copying:
                return False
            event, slots = self._copying[0]
            event.synchronize()
            del self._copying[0]
            self._free_copied(event, slots)
        return True

    def _page_lock(self, slot: Slot) -> None:
        """Page-lock what batches use of `slot`, and an eighth more, once; stop pinning when the system refuses."""
        if slot.locked_nbytes >= slot.used_nbytes:
            return
        slot.unlock()
        nbytes = min(round_up(slot.used_nbytes + slot.used_nbytes // 8, PAGE), slot.nbytes)
        if sum(other.locked_nbytes for other in self._all_slots()) + nbytes > self._pin_budget:
            return
        assert self._pin is not None
        slot.page_lock = self._pin(slot.memory[:nbytes])
        if slot.page_lock is None:
            self._pin, slot.locked_nbytes = None, 0
        else:
            slot.locked_nbytes = nbytes
            slot.address = np.frombuffer(slot.memory, np.uint8).ctypes.data

    def _reuse(self, slot: Slot) -> None:
        if slot.segment not in self._segments:  # of the process that this one was forked from
            return
        if slot.is_seen_by_forks or slot.nbytes < self._batch_nbytes:
            self._retire(slot)
        else:
            self._free.append(slot)

    def _retire(self, slot: Slot) -> None:
        """Drop a slot that is not used again, and its segment with the last of its slots."""
        segment = self._segments[slot.segment]
        segment.slots.remove(slot)
        self._count -= 1
        slot.drop_memory()
        if not segment.slots:
            del self._segments[slot.segment]
            self.announce(slot.segment, None)
            segment.segment.close()

    def _learn_size(self, nbytes: int) -> None:
        if nbytes <= self._batch_nbytes:
            return
        self._batch_nbytes = nbytes
        for slot in [slot for slot in self._free if slot.nbytes < nbytes]:
            self._free.remove(slot)
            self._retire(slot)

    def _cost(self, slots: list[Slot]) -> int:
        return sum(slot.used_nbytes for slot in slots)

    def _affordable(self, wanted: int) -> int:
        """Return how many more slots, at most `wanted`, the budget allows."""
        expected = max(self._batch_nbytes, 1)
        committed = sum(max(slot.used_nbytes, expected) for slot in self._all_slots())
        return min(wanted, max(0, self._budget - committed) // expected)

    def _can_fill_free(self) -> bool:
        """Return whether there is a free slot that may be filled within the budget.

        The first slots are made before any batch has shown its size, so all of them together may exceed the budget.
        """
        if not self._free:
            return False
        if self._free[-1].used_nbytes >= self._batch_nbytes:
            return True
        more = self._batch_nbytes - self._free[-1].used_nbytes
        slots = self._all_slots()
        if all(slot.state is SlotState.FREE for slot in slots):
            return True
        busy = (
            max(slot.used_nbytes, self._batch_nbytes) if slot.state is not SlotState.FREE else slot.used_nbytes
            for slot in slots
        )
        return sum(busy) + more <= self._budget

    def _count_in_use(self) -> int:
        """Return how many slots are neither free nor held by the user."""
        return self._count - len(self._free) - len(self._leases)

    def _all_slots(self) -> list[Slot]:
        return [slot for segment in list(self._segments.values()) for slot in list(segment.slots)]

    def _grow(self, wanted: int) -> bool:
        """Add slots: as many as `wanted` at first, then as many again as there are."""
        present = len(self._all_slots())
        count = self._affordable(max(wanted - present, present, 1))
        if count == 0:
            return False
        each = self._slot_nbytes()
        try:
            memory = self._make(each * count)
        except TransportError:
            if each <= _MODEST_NBYTES or self._batch_nbytes:
                raise
            each = _MODEST_NBYTES  # address space is limited (ulimit -v), and no batch has shown its size yet
            memory = self._make(each * count)
        number = self._take_number()
        segment = _Segment(memory)
        for offset in range(0, each * count, each):
            segment.slots.append(Slot(number, offset, each, memory.memory[offset : offset + each]))
        self._grown += bool(self._segments)
        self._segments[number] = segment
        self._free.extend(segment.slots)
        self._count += len(segment.slots)
        self.announce(number, memory)
        return True

    def _slot_nbytes(self) -> int:
        if not self._batch_nbytes:
            return min(GENEROUS_NBYTES, round_up(self._budget, PAGE))
        # An eighth more than the largest batch so far, so that slightly larger ones fit as well.
        roomy = self._batch_nbytes + self._batch_nbytes // 8
        return round_up(roomy, _GRAIN if roomy > _GRAIN else PAGE)

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1


# ── forks: a forked process sees the slots that its parent holds, and may read them ─────────────────────────────

_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _before_fork() -> None:
    for ring in walk(_rings):
        ring.before_fork()


def _after_fork_in_child() -> None:
    for ring in walk(_rings):
        ring.after_fork_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
