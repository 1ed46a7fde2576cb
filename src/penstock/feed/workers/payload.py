"""The payload: a worker's job, made ready to travel once for all workers.

For fork it is the job itself. For forkserver and spawn it is pickled once, its arrays and tensors out of band in one
shared segment that each worker maps privately: pages are shared until a worker writes to them, so a dataset of many
gigabytes is neither pickled per worker nor copied per worker (pytorch#13246, pytorch#139792). What belongs to
multiprocessing itself (queues, locks, shared values) can only be pickled while a process is being started; a job
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
from penstock.core.units import round_up
from penstock.feed.transport import codec
from penstock.feed.transport.room import ALIGNMENT, Room
from penstock.feed.transport.slab import create


class Payload:
    """A job on its way to workers. `pack` once, hand it to each process's start, `open` there, `close` at the end."""

    def __init__(self, job: Any, envelope: bytes | None = None, segment: Any = None) -> None:
        self._job = job
        self._envelope = envelope
        self._segment = segment
        self._fd = -1

    @classmethod
    def pack(cls, job: Any, start_method: str, *, named: bool) -> Payload:
        """Return `job` ready to travel to processes started by `start_method`.

        Raises:
            UnpicklableError: something in it cannot be pickled; the message says what, as far as that is known.
        """
        if start_method == "fork":
            return cls(job)
        try:
            skeleton, arrays = codec.flatten(job, _refuse_bound_to_start)
        except _BoundToStartError:
            return cls(job)
        except Exception as error:
            raise UnpicklableError(
                f"{_culprit(job)} cannot be pickled, which start method {start_method!r} needs: {error}; define it "
                "at the top of a module (no lambda, no local class, no open file), or pass "
                "multiprocessing_context='fork'"
            ) from error
        nbytes = sum(round_up(array.nbytes, ALIGNMENT) for array in arrays)
        if named or nbytes <= codec.INBAND_NBYTES:
            return cls(None, codec.pack(skeleton, arrays, None))
        segment = create(nbytes, named=False)
        return cls(None, codec.pack(skeleton, arrays, Room(np.frombuffer(segment.memory, np.uint8))), segment)

    def __getstate__(self) -> Any:
        """Called while a process is being started: the descriptor travels by multiprocessing's own means."""
        fd = DupFd(self._segment.handle().fd) if self._segment is not None else None
        nbytes = self._segment.nbytes if self._segment is not None else 0
        return self._job, self._envelope, fd, nbytes

    def __setstate__(self, state: Any) -> None:
        self._job, self._envelope, fd, self._nbytes = state
        self._segment = None
        self._fd = fd.detach() if fd is not None else -1

    def open(self) -> Any:
        """Return the job, in the worker."""
        if self._envelope is None:
            return self._job
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
    """The job holds something that multiprocessing only pickles while it starts a process."""


def _refuse_bound_to_start(obj: Any) -> None:
    module = type(obj).__module__ or ""
    if module.startswith(("multiprocessing.", "torch.multiprocessing")) or isinstance(obj, socket.socket):
        raise _BoundToStartError
    if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
        raise _BoundToStartError


def _culprit(job: Any) -> str:
    """Return words for the smallest named part of the job that cannot be pickled."""
    for name in ("dataset", "collate_fn", "errors"):
        part = getattr(job, name, None)
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
