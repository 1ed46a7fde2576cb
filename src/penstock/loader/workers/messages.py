"""Tasks and results: one form of each, whatever a worker is; and as messages between processes, their bytes.

To a worker's inbox, the first byte is the kind:

    W  a task for this worker only (the bytes of a task, below)
    S  a new segment: pickled (number, nbytes), with its descriptor
    F  forget a segment: its pickled number
    E  a new epoch: the pickled shards of an iterable dataset that this worker has, by position
    Q  quit when the messages before this one are done

To the shared queue go tasks only, without a kind. A task is the struct `TASK`, then the indices: integers of 4 or 8
bytes, else a pickle, which takes ten times as long where the caches are cold.

From a worker, a result is the struct `_RESULT`, pickled extras (none for most results),
then the envelope: the encoded batch or the pickled exception, as the outcome demands.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.shared_segment import Handle, SharedSegment, attach
from penstock.loader.transport.arena import Arena
from penstock.loader.transport.ring import Slot

TASK = struct.Struct("<QQBqqqIQBB")
"""Head of a task: seq, epoch, has slot, segment, offset, nbytes, shard, epoch's seed, whether the shard's state is
wanted, bytes of an index (0: the indices are pickled)."""

_SEQ_EPOCH = struct.Struct("<QQ")
"""What a task begins with."""

_RESULT = struct.Struct("<QIBQQQQQQII")
"""Head of a result: seq, worker, outcome, samples, batch bytes, fetch ns, collate ns, busy ns, began ns, pid, bytes of
the extras."""

_NO_SLOT = False, 0, 0, 0

BATCH, ENDED, EMPTY, FAILED, CANCELLED = range(5)
"""The outcomes of a task."""


def pack_task(task: Task, epoch: int) -> bytes:
    """Return the bytes of a task."""
    slot = task.slot
    place = slot.place if slot is not None else _NO_SLOT
    packed = task.packed
    index_nbytes = len(packed) // len(task.indices) if packed else 0
    head = TASK.pack(task.seq, epoch, *place, task.shard, task.epoch_seed, task.wants_state, index_nbytes)
    return head + (packed or pickle.dumps(task.indices, 5))


def indices_of(message: memoryview) -> Any:
    """Return the indices of a packed task."""
    index_nbytes = message[TASK.size - 1]
    if not index_nbytes:
        return pickle.loads(message[TASK.size :])
    return np.frombuffer(message, f"i{index_nbytes}", offset=TASK.size).tolist()


def unpack_task(message: memoryview) -> tuple[Task, tuple[int, int, int] | None]:
    """Return a task; and the segment, offset and size of its slot, if it has one."""
    seq, _, has_slot, segment, offset, nbytes, shard, seed, wants_state, _ = TASK.unpack_from(message)
    task = Task(seq, 0, indices_of(message), epoch_seed=seed)
    task.shard, task.wants_state = shard, bool(wants_state)
    return task, (segment, offset, nbytes) if has_slot else None


def task_seq(message: bytes | memoryview) -> int:
    """Return the sequence number of a packed task."""
    return int(_SEQ_EPOCH.unpack_from(message)[0])


def task_epoch(message: bytes | memoryview) -> int:
    """Return the epoch of a packed task."""
    return int(_SEQ_EPOCH.unpack_from(message)[1])


def pack_segment(number: int, segment: SharedSegment) -> bytes:
    """Return the message that announces a segment; its descriptor travels beside it."""
    return b"S" + pickle.dumps((number, segment.nbytes))


def pack_result(result: Result, pid: int) -> tuple[bytes, list[int]]:
    """Return the message of a result, and the descriptors that travel with it."""
    oversize, extras = result.oversize, b""
    if result.skipped or result.state or oversize is not None:
        extras = pickle.dumps((result.skipped, oversize and oversize.nbytes, result.state))
    body = result.envelope or b""
    if result.envelope is not None:
        outcome = BATCH
    elif result.error is not None:
        outcome, body = FAILED, pickle.dumps(result.error)
    else:
        outcome = ENDED if result.ended else EMPTY if result.empty else CANCELLED
    times = (result.fetch_ns, result.collate_ns, result.busy_ns, result.began_ns, pid)
    head = _RESULT.pack(result.seq, result.worker, outcome, result.samples, result.nbytes, *times, len(extras))
    fd = oversize.handle().fd if oversize is not None else None
    return b"".join((head, extras, body)), [] if fd is None else [fd]


def unpack_result(message: bytes, fds: Sequence[int]) -> Result:
    """Return the result that a worker has sent; it owns the segment that came with it."""
    seq, worker, outcome, samples, nbytes, fetch_ns, collate_ns, busy_ns, began_ns, pid, length = _RESULT.unpack_from(
        message
    )
    result = Result(seq, worker)
    result.samples, result.nbytes, result.pid, result.began_ns = samples, nbytes, pid, began_ns
    result.fetch_ns, result.collate_ns, result.busy_ns = fetch_ns, collate_ns, busy_ns
    start = _RESULT.size
    if length:
        extras: tuple[Any, ...] = pickle.loads(memoryview(message)[start : start + length])
        result.skipped, segment_nbytes, state = extras
        result.state = pickle.loads(state) if state else None
        if segment_nbytes is not None:
            result.oversize = attach(Handle(segment_nbytes, fds[0]))
        start += length
    if outcome == BATCH:
        result.envelope = message[start:]
    elif outcome == FAILED:
        result.error = pickle.loads(memoryview(message)[start:])
    else:
        result.ended, result.empty, result.cancelled = outcome == ENDED, outcome == EMPTY, outcome == CANCELLED
    return result


class Task:
    """A batch for one worker to make.

    Most batches differ in four attributes only: what all of them begin with belongs to the class.

    Args:
        seq: unique within its pool, and larger than that of every task submitted before.
        number: of the batch within its epoch.
        indices: of its samples.
        slot: where the batch is to lie, if it is large enough.
        worker: the worker that must make it; None when any free one may.
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
        number: int,
        indices: Any,
        slot: Slot | None = None,
        worker: int | None = None,
        epoch_seed: int = 0,
        packed: bytes = b"",
    ) -> None:
        self.seq = seq
        self.number = number
        self.indices = indices
        self.slot = slot
        self.worker = worker
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
