"""Runs a peer in a separate process, an epoch at a time on request.

Why a separate process: some peers have hung (torchdata.nodes in process mode, FACTS 2), some start thread pools that
must not be forked, and none may slow the process in which penstock and torch are measured. A peer that does not answer
in time is killed with all its descendants, and reported. So is one whose first epoch has other samples than the
dataset, where those are the same in every epoch; their order is the peer's.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.adapters import LoaderAdapter
from benchmarks.epoch_timing import Consumer, EpochTiming, arrays, time_epoch
from benchmarks.workloads import Copied, Integers, Pool, Workload

TIMEOUT_S = 90.0
STOPPING_S = 10.0


class PeerFailedError(Exception):
    """A peer did not start, raised, died, or did not answer in time."""


@contextmanager
def served(peer: LoaderAdapter, workload: Workload, way: str) -> Iterator[Callable[[], EpochTiming]]:
    """Start a process for `peer`, and yield a function that has it run one epoch."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, peer, workload, way), name=f"bench {peer.name}")
    process.start()
    theirs.close()

    def answer() -> Any:
        try:
            if not ours.poll(TIMEOUT_S):
                raise PeerFailedError(f"no answer in {TIMEOUT_S:.0f} s")
            reply = ours.recv()
        except (EOFError, OSError) as error:
            raise PeerFailedError("its process died") from error
        if isinstance(reply, str):
            raise PeerFailedError(reply)
        return reply

    def run() -> EpochTiming:
        with suppress(OSError):  # a dead process is found by the answer
            ours.send("epoch")
        found: EpochTiming = answer()
        return found

    try:
        answer()
        yield run
    finally:
        with suppress(OSError):  # not left to the pipe's end, of which workers forked since then have a copy
            ours.send(None)
        ours.close()
        process.join(STOPPING_S)
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


class SampleSum:
    """Consumes an epoch, and knows which samples were in it, in whatever order."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, batch: Any) -> None:
        """Count the samples of one batch."""
        for array in arrays(batch):
            self.total += sum(zlib.crc32(np.ascontiguousarray(row)) for row in array)

    def check(self, workload: Workload) -> None:
        """Raise ValueError if the samples were not those of a workload that has the same ones in every epoch."""
        dataset = workload.dataset
        if not isinstance(dataset, Pool | Integers | Copied):
            return
        wanted = sum(zlib.crc32(np.ascontiguousarray(dataset[index])) for index in range(workload.samples))
        if self.total != wanted:
            raise ValueError(f"an epoch had other samples than {workload.name}")


def _serve(asked: Connection, peer: LoaderAdapter, workload: Workload, way: str) -> None:
    os.setsid()  # so that its descendants can be ended with it
    consume = Consumer(way)
    try:
        with peer.open(workload) as epochs:
            asked.send(True)
            with suppress(EOFError):
                first = SampleSum()
                if asked.recv():
                    timing = time_epoch(epochs, first)
                    first.check(workload)
                    asked.send(timing)
                while asked.recv():
                    asked.send(time_epoch(epochs, consume))
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        with suppress(OSError):
            asked.send(f"{type(error).__name__}: {error}"[:300])
