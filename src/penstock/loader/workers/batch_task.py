"""A task, which is one batch for a worker to make, and its result: one form of each, whatever the worker is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.shared_segment import SharedSegment
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.slot import Slot


class Task:
    """A batch for one worker to make.

    Most batches differ in four attributes only: what all of them begin with belongs to the class.

    Args:
        seq: unique within its pool, and larger than that of every task submitted before.
        batch: the number of its batch within the epoch.
        indices: of its samples.
        slot: where the batch is to lie, if it is large enough.
        worker: the worker that must make it; None when any free one may.
        destination: the scheduler's own: the batch that the result belongs to. Never leaves the training process.
        epoch_seed: what the randomness of its samples depends on; see `sample_seed`.
        packed: the indices as integers of 4 or 8 bytes, if that is all that they are.
    """

    shard: int = 0
    """Of an iterable dataset: the position of its shard in the round of shards."""
    wants_state: bool = False
    """Whether the result must carry the state of the shard after it."""
    cancelled: bool = False
    """Set by the pool's `cancel`: the result will be thrown away."""

    def __init__(
        self,
        seq: int,
        batch: int,
        indices: Any,
        slot: Slot | None = None,
        worker: int | None = None,
        destination: Any = None,
        epoch_seed: int = 0,
        packed: bytes = b"",
    ) -> None:
        self.seq = seq
        self.batch = batch
        self.indices = indices
        self.slot = slot
        self.worker = worker
        self.destination = destination
        self.epoch_seed = epoch_seed
        self.packed = packed


class Result:
    """What became of one task: an envelope, a batch, an error, or one of ended, cancelled and empty.

    Most results differ in few attributes: what all of them begin with belongs to the class.

    Args:
        seq: of the task.
        worker: that made it.
        task: filled in by pools whose tasks never travel back.
        error: a torch ExceptionWrapper.
    """

    envelope: bytes | None = None
    """The batch, encoded."""
    batch: Any = None
    """The batch itself, when it was made in the training process."""
    is_batch: bool = False
    """Whether `batch` is one (a batch may be None)."""
    ended: bool = False
    """The shard of an iterable dataset is exhausted, and this task got nothing."""
    cancelled: bool = False
    empty: bool = False
    """Every sample was skipped."""
    arena: Arena | None = None
    """While the batch is made: where."""
    oversize: SharedSegment | None = None
    """The segment that holds the batch, because it outgrew its slot."""
    samples: int = 0
    nbytes: int = 0
    """Of its slot that the batch takes."""
    pid: int = 0
    """The process that made it; 0 for the training process."""
    began_ns: int = 0
    """When it was begun, on the clock of `time.perf_counter_ns`, which all processes share."""
    fetch_ns: int = 0
    collate_ns: int = 0
    busy_ns: int = 0
    """How much of both was computing rather than waiting; see `busy_time`."""
    skipped: Sequence[tuple[Any, str]] = ()
    """Index and error of each sample that was left out or replaced."""
    state: Any = None
    """The state of its shard after it, where one was asked for and the dataset has one; pickled while it travels."""

    def __init__(self, seq: int = 0, worker: int = 0, task: Task | None = None, error: Any = None) -> None:
        self.seq = seq
        self.worker = worker
        self.task = task
        self.error = error
