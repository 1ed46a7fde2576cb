"""A worker's spec, pickled once for all workers.

For fork it is the spec itself. For forkserver and spawn it is pickled once, its arrays and tensors out of band in one
shared segment that each worker maps privately: pages are shared until a worker writes to them, so a dataset of many
gigabytes is neither pickled per worker nor copied per worker (pytorch#13246, pytorch#139792). What belongs to
multiprocessing itself (queues, locks, shared values) can only be pickled while a process is being started; a spec
that holds such a thing is pickled per worker, as torch does.
"""

from __future__ import annotations

import mmap
import os
import socket
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from penstock.core.errors import UnpicklableError
from penstock.core.shared_segment import create
from penstock.core.units import round_up
from penstock.loader.transport import codec
from penstock.loader.transport.arena import ALIGNMENT, Arena


class PickledSpec:
    """A spec on its way to workers: `pack` it once, pass it to each process, `open` it there, `close` it last."""

    def __init__(self, worker_spec: Any, envelope: bytes | None = None, segment: Any = None) -> None:
        self._worker_spec = worker_spec
        self._envelope = envelope
        self._segment = segment
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
            skeleton, arrays = codec.flatten(worker_spec, _refuse_bound_to_start)
        except _BoundToStartError:
            return cls(worker_spec)
        except Exception as error:
            raise unpicklable_error(worker_spec, None, start_method, error) from error
        nbytes = sum(round_up(array.nbytes, ALIGNMENT) for array in arrays)
        if named or nbytes <= codec.INLINE_NBYTES:
            return cls(None, codec.pack(skeleton, arrays, None))
        segment = create(nbytes, named=False)
        return cls(None, codec.pack(skeleton, arrays, Arena(np.frombuffer(segment.memory, np.uint8))), segment)

    def __getstate__(self) -> Any:
        """Duplicate the descriptor for the new process; multiprocessing calls this while it starts one."""
        fd = DupFd(self._segment.handle().fd) if self._segment is not None else None
        nbytes = self._segment.nbytes if self._segment is not None else 0
        return self._worker_spec, self._envelope, fd, nbytes

    def __setstate__(self, state: Any) -> None:
        self._worker_spec, self._envelope, fd, self._nbytes = state
        self._segment = None
        self._fd = fd.detach() if fd is not None else -1

    def open(self) -> Any:
        """Return the spec, in the worker."""
        if self._envelope is None:
            return self._worker_spec
        if self._fd < 0:
            return codec.decode(self._envelope, None)
        pages = mmap.mmap(self._fd, self._nbytes, flags=mmap.MAP_PRIVATE)
        os.close(self._fd)
        return codec.decode(self._envelope, np.frombuffer(pages, np.uint8))

    def close(self) -> None:
        """Let go of the segment; workers that have mapped it keep it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class _BoundToStartError(Exception):
    """The spec holds something that multiprocessing only pickles while it starts a process."""


def _refuse_bound_to_start(obj: Any) -> None:
    module = type(obj).__module__ or ""
    if module.startswith(("multiprocessing.", "torch.multiprocessing")) or isinstance(obj, socket.socket):
        raise _BoundToStartError
    if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
        raise _BoundToStartError


def unpicklable_error(worker_spec: Any, init_fn: Any, start_method: str, error: Exception) -> UnpicklableError:
    """Return the error that names what of the spec, or of what travels beside it, could not be pickled."""
    return UnpicklableError(
        f"{_unpicklable_part(worker_spec, init_fn)} cannot be pickled, which start method {start_method!r} needs: "
        f"{error}; define it at the top of a module (no lambda, no local class, no open file), or pass "
        "multiprocessing_context='fork'"
    )


def _unpicklable_part(worker_spec: Any, init_fn: Any) -> str:
    """Return a description of the smallest named part that cannot be pickled."""
    parts = {name: getattr(worker_spec, name, None) for name in ("collate_fn", "errors", "dataset")}
    for name, part in {"worker_init_fn": init_fn, **parts}.items():
        if _pickles(part):
            continue
        for attribute, value in getattr(part, "__dict__", {}).items():
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
