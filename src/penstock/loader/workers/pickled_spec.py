"""A worker's spec, pickled once for all workers.

For fork it is the spec itself. For forkserver and spawn it is pickled once, its arrays out of band in one shared
segment that each worker maps privately: pages are shared until a worker writes to them, so a dataset of many
gigabytes is neither pickled per worker nor copied per worker (pytorch#13246, pytorch#139792). Tensors are moved to
shared memory and go to each worker beside it, as torch sends them: the program and all workers see what one of them
writes. Of tensors that torch could not send either, each worker has its own, as of arrays. What belongs to
multiprocessing itself (queues, locks, shared values) can only be pickled while a process is being started; a spec
that holds such a thing is pickled per worker, as torch does.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from penstock.core.errors import UnpicklableError
from penstock.core.object_attributes import attributes_of
from penstock.core.shared_segment import create
from penstock.core.units import round_up
from penstock.loader.transport import codec
from penstock.loader.transport.arena import ALIGNMENT, Arena

_MOST_TENSORS = 200
"""More are not shared: each takes a descriptor, and one message to a fork server carries 253."""

_SHARED_MEMORY = "/dev/shm"


class PickledSpec:
    """A spec on its way to workers: `pack` it once, pass it to each process, `open` it there, `close` it last."""

    def __init__(
        self, worker_spec: Any, envelope: bytes | None = None, segment: Any = None, tensors: Sequence[Any] = ()
    ) -> None:
        self._worker_spec = worker_spec
        self._envelope = envelope
        self._segment = segment
        self._tensors = tensors
        self._fd = -1

    @classmethod
    def pack(cls, worker_spec: Any, start_method: str, *, named: bool) -> PickledSpec:
        """Return `worker_spec` ready to travel to processes started by `start_method`.

        Raises:
            UnpicklableError: something in it cannot be pickled; the message names it, as far as that is known.
        """
        if start_method == "fork":
            return cls(worker_spec)
        try:
            tensors = _SharedTensors()
            skeleton, arrays = codec.flatten(worker_spec, tensors.visit)
            if not tensors.can_be_shared():
                tensors = _SharedTensors(only_shared=True)
                skeleton, arrays = codec.flatten(worker_spec, tensors.visit)
        except RuntimeError:  # multiprocessing's, of what a program has derived from its classes, and ours
            return cls(worker_spec)
        except Exception as error:
            raise unpicklable_error(worker_spec, start_method, error) from error
        nbytes = sum(round_up(array.nbytes, ALIGNMENT) for array in arrays)
        if named or nbytes <= codec.INLINE_NBYTES:
            return cls(None, codec.pack(skeleton, arrays, None), None, tensors.found)
        segment = create(nbytes, named=False)
        envelope = codec.pack(skeleton, arrays, Arena(np.frombuffer(segment.memory, np.uint8)))
        return cls(None, envelope, segment, tensors.found)

    def __getstate__(self) -> Any:
        """Duplicate the descriptor for the new process; multiprocessing calls this while it starts one."""
        fd = DupFd(self._segment.handle().fd) if self._segment is not None else None
        nbytes = self._segment.nbytes if self._segment is not None else 0
        return self._worker_spec, self._envelope, self._tensors, fd, nbytes

    def __setstate__(self, state: Any) -> None:
        self._worker_spec, self._envelope, self._tensors, fd, self._nbytes = state
        self._segment = None
        self._fd = fd.detach() if fd is not None else -1

    def open(self) -> Any:
        """Return the spec, in the worker."""
        if self._envelope is None:
            return self._worker_spec
        _arrived[:] = self._tensors
        try:
            if self._fd < 0:
                return codec.decode(self._envelope, None)
            pages = mmap.mmap(self._fd, self._nbytes, flags=mmap.MAP_PRIVATE)
            os.close(self._fd)
            return codec.decode(self._envelope, np.frombuffer(pages, np.uint8))
        finally:
            _arrived.clear()

    def close(self) -> None:
        """Let go of the segment; workers that have mapped it keep it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


_arrived: list[Any] = []
"""In a worker that opens its spec: the tensors that came beside it."""


def _take_tensor(number: int) -> Any:
    return _arrived[number]


class _SharedTensors:
    """The tensors that go to a worker beside the pickle.

    Args:
        only_shared: leave those in the pickle that are in no shared memory yet.
    """

    def __init__(self, *, only_shared: bool = False) -> None:
        self.found: list[torch.Tensor] = []
        self._only_shared = only_shared

    def visit(self, obj: Any) -> tuple[Any, ...] | None:
        """Return how to pickle a tensor that goes beside the pickle; None for anything else.

        Raises:
            RuntimeError: only multiprocessing's own pickle, while it starts a process, can give that to a worker.
        """
        module = type(obj).__module__ or ""
        if module.startswith(("multiprocessing.", "torch.multiprocessing")) or isinstance(obj, socket.socket):
            raise RuntimeError
        if not isinstance(obj, torch.Tensor) or (obj.device.type == "cpu" and obj.layout is not torch.strided):
            return None
        if self._only_shared and _unshared(obj) is not None:
            return None
        self.found.append(obj)
        return _take_tensor, (len(self.found) - 1,)

    def can_be_shared(self) -> bool:
        """Return whether there is room for those that are in no shared memory yet."""
        unshared = {memory._cdata: memory.nbytes() for tensor in self.found if (memory := _unshared(tensor))}
        if not unshared or not os.path.exists(_SHARED_MEMORY):
            return not unshared
        room = os.statvfs(_SHARED_MEMORY)
        return len(unshared) <= _MOST_TENSORS and sum(unshared.values()) <= room.f_bavail * room.f_frsize // 2


def _unshared(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage if it is this process's own; None if other processes may have it, too."""
    return tensor.untyped_storage() if tensor.device.type == "cpu" and not tensor.is_shared() else None


def unpicklable_error(worker_spec: Any, start_method: str, error: Exception) -> UnpicklableError:
    """Return the error that names what of the spec could not be pickled."""
    return UnpicklableError(
        f"{_unpicklable_part(worker_spec)} cannot be pickled, which start method {start_method!r} needs: "
        f"{error}; define it at the top of a module (no lambda, no local class, no open file), or pass "
        "multiprocessing_context='fork'"
    )


def _unpicklable_part(worker_spec: Any) -> str:
    """Return a description of the smallest named part that cannot be pickled."""
    parts = {"worker_init_fn": "init_fn", "collate_fn": "collate_fn", "errors": "errors", "dataset": "dataset"}
    for name, field in parts.items():
        part = getattr(worker_spec, field, None)
        if _pickles(part):
            continue
        for attribute, value in attributes_of(part).items():
            if not _pickles(value):
                return f"{name}.{attribute} ({type(value).__qualname__})"
        return f"the {name} ({type(part).__qualname__})"
    return "the dataset"


def _pickles(obj: Any) -> bool:
    try:
        codec.flatten(obj)
    except Exception:
        return False
    return True
