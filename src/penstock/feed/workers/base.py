"""What the bodies have in common: a piece of work, what comes back, and the protocol of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.core.batch import BatchSpec
from penstock.feed.transport.ring import Slot
from penstock.feed.transport.slab import Slab
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.maker import Part


@dataclass(slots=True, eq=False)
class Piece:
    """A batch, or some rows of one, for one worker to make. `seq` is unique within its pool."""

    seq: int
    batch: int
    indices: Any
    slot: Slot | None = None
    part: Part | None = None
    worker: int | None = None
    """The worker it is meant for; None when any free one may take it."""
    lane: int = 0
    """Of an iterable dataset: the place, in the round of lanes, of the one that it is cut from."""
    epoch_seed: int | None = None
    """What the randomness of its samples depends on; see `sample_seed`."""
    snapshot: bool = False
    """Whether its lane's state is to be reported after it."""
    cancelled: bool = False
    into: Any = None
    """For whoever gives out pieces: where the result belongs."""


@dataclass(slots=True)
class Report:
    """What became of one piece."""

    seq: int
    worker: int
    piece: Piece | None = None
    """The piece it is about; the pool fills it in."""
    envelope: bytes | None = None
    """The batch, encoded."""
    batch: Any = None
    """The batch itself, from the training process."""
    is_batch: bool = False
    """Whether `batch` is one."""
    part: tuple[BatchSpec, list[list[Any]]] | None = None
    error: Any = None
    """A torch ExceptionWrapper."""
    ended: bool = False
    """An iterable dataset has nothing left for this worker."""
    cancelled: bool = False
    empty: bool = False
    """Every sample was skipped."""
    oversize: Slab | None = None
    """The segment that the batch came in, because it outgrew its slot."""
    needed: int = 0
    """The bytes of slot that would have done, when a part's was too small."""
    samples: int = 0
    nbytes: int = 0
    pid: int = 0
    """The process that made it; 0 for this one."""
    began_ns: int = 0
    """When it was begun, on the clock of `time.perf_counter_ns`, which all processes share."""
    fetch_ns: int = 0
    collate_ns: int = 0
    evidence: str = ""
    """What tells the workers apart, as far as this piece goes; see `witness`."""
    skipped: list[tuple[Any, str]] = field(default_factory=list)
    state: Any = None
    """The state of its lane after it, where one was asked for and the dataset has one."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker process ended without being asked to."""

    worker: int
    pid: int
    cause: str
    """As in 'is killed by signal: Segmentation fault.'"""
    lost: Sequence[Piece]
    """The pieces it had, none of which will be reported."""
    blamed: Piece | None
    """The one it was making."""
    row: int
    """The row of that piece it was making."""
    is_retired: bool = False
    """It was going anyway, and needs no successor."""
    is_innocent: bool = False
    """Its machine is gone, or cannot be reached: no sample is to blame, and not how workers are started."""


class Pool(Protocol):
    """Several workers that make pieces. All methods are called in the training process, by one thread at a time.

    Order: `start`, then `submit` and `collect` in any order, `cancel` between epochs, `close` once. After an
    exception only `close` may be called.
    """

    size: int
    processes: list[Any]
    """Worker processes (`multiprocessing.Process`), by worker number; none for threads."""

    def start(self, lanes: Sequence[Lane]) -> None:
        """Start the workers. Of an iterable dataset's lanes, the i-th runs on worker i modulo `size`."""
        ...

    def resize(self, workers: int) -> bool:
        """Start workers or let some go, until there are `workers`; return False when that must be tried again later.

        Nothing is lost: who goes finishes its piece. Only while any worker may take any piece, or to have more.
        """
        ...

    def is_ready(self, worker: int) -> bool:
        """Return whether a worker that was started has opened its dataset, and takes pieces."""
        ...

    def present(self) -> int:
        """Return how many workers, from number 0 on, a piece may be meant for now: all, where they start at once."""
        ...

    def outstanding(self) -> int:
        """Return how many pieces are given out and have not come back."""
        ...

    def announce(self, number: int, slab: Slab | None) -> None:
        """Tell every worker of a new slab, or (None) that it may let go of one."""
        ...

    def submit(self, piece: Piece) -> None:
        """Give out a piece; never blocks."""
        ...

    def collect(self, timeout_s: float | None) -> list[Report | Death]:
        """Wait until something happens, at most `timeout_s` seconds, and return all that has happened."""
        ...

    def replace(self, worker: int, lanes: Sequence[Lane]) -> None:
        """Start a successor for a dead worker, with its share of the lanes as they are now."""
        ...

    def piece(self, worker: int) -> tuple[Piece | None, int]:
        """Return the piece that a worker is making and the row it has come to, as far as that is known."""
        ...

    def rewind(self, worker: int) -> None:
        """Put a worker's random state back to where it was before its first piece."""
        ...

    def cancel(self, lanes: Sequence[Lane]) -> list[Piece]:
        """Abandon all pieces and begin a new epoch with these lanes; return the pieces that no worker had taken."""
        ...

    def close(self) -> None:
        """Stop the workers and wait for them."""
        ...
