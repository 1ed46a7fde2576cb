"""The sources of batches for an examined loop: its own loader, another loader, or one batch repeated."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.host import usable_cores
from penstock.loader.workers.thread_gate import ThreadGate
from penstock.observe.doctor.probes.batch_values import copy_containers

_STOPPING_S = 0.5

iterate_unpatched: Callable[[DataLoader[Any]], Any] = DataLoader.__iter__
"""`iter(loader)` as it is while `program_loops` has patched `DataLoader.__iter__`."""


@contextlib.contextmanager
def impatient_close() -> Iterator[None]:
    """Let torch's loaders terminate a worker that has not stopped after a moment; they would wait for five seconds.

    On a busy machine a worker that is not given its moment may end with a lock of the dataset's, for good.
    """
    utils: Any = torch.utils.data._utils
    crowd = os.getloadavg()[0] / usable_cores() if hasattr(os, "getloadavg") else 1.0
    patience_s = min(utils.MP_STATUS_CHECK_INTERVAL, _STOPPING_S * max(1.0, crowd))
    before, utils.MP_STATUS_CHECK_INTERVAL = utils.MP_STATUS_CHECK_INTERVAL, patience_s
    try:
        yield
    finally:
        utils.MP_STATUS_CHECK_INTERVAL = before


class BatchSource:
    """A loader, epoch after epoch, that can be paused between two batches.

    Args:
        name: of its trial.
        make: returns the loader; called when the source is opened.
        line: the arguments that a user would write for it.
    """

    starts_processes = True

    def __init__(self, name: str, make: Callable[[], DataLoader[Any]], *, line: str = "") -> None:
        self.name = name
        self.line = line
        self.failure = ""
        self.is_live = True
        self.startup_s: float | None = None
        self.start_s = 0.0
        """How long the last batch took if an epoch began with it, after another one; else 0."""
        self.loader: DataLoader[Any] | None = None
        self._restarts_s: list[float] = []
        self._opened_s = 0.0
        self._make = make
        self._iterator: Any = None
        self._pids: list[int] = []

    @property
    def runs_in_this_process(self) -> bool:
        """Whether the dataset is called in this process."""
        return False

    @property
    def restart_s(self) -> float | None:
        """Median seconds from requesting a batch after an epoch's last to the next epoch's first; None before that."""
        return statistics.median(self._restarts_s) if self._restarts_s else None

    @property
    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._iterator is not None

    @property
    def prefetch_limit(self) -> int:
        """How many batches it may have prefetched."""
        return self.loader.num_workers * (self.loader.prefetch_factor or 0) if self.loader is not None else 0

    def open(self) -> None:
        """Create the loader and start its workers.

        Raises:
            Exception: from the loader, for instance because its dataset cannot be pickled.
        """
        if self._iterator is not None:
            return
        began = time.perf_counter()
        self.loader = self.loader or self._make()
        self._iterator = iterate_unpatched(self.loader)
        self._opened_s = time.perf_counter() - began
        self._note_workers()

    def warm_up(self) -> None:
        """Open it and draw one batch per worker, so that all workers have started."""
        self.open()
        for _ in range(max(1, self.loader.num_workers) if self.loader is not None else 0):
            self.next_batch()

    def next_batch(self) -> Any:
        """Return the next batch; after the last of an epoch, the first of the next one.

        Raises:
            RuntimeError: an epoch has no batch.
            Exception: from the loader.
        """
        self.open()
        began = time.perf_counter()
        is_restart = False
        for _ in range(2):
            try:
                batch = next(self._iterator)
                break
            except StopIteration:
                is_restart = True
                self._iterator = iterate_unpatched(self.loader)  # type: ignore[arg-type]
                self._note_workers()
        else:
            raise RuntimeError(f"an epoch of this loader has no batch: {_why_empty(self.loader)}")
        self.start_s = time.perf_counter() - began if is_restart else 0.0
        if is_restart:
            self._restarts_s.append(self.start_s)
        if self.startup_s is None:
            self.startup_s = self._opened_s + time.perf_counter() - began
        return batch

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return self._pids

    def pause(self) -> None:
        """Stop its workers where they are, so that they neither compute nor prefetch."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its workers continue."""
        self._signal(signal.SIGCONT)

    def fail(self, error: Exception) -> None:
        """Close it for good, because of `error`."""
        self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        self.retire()

    def retire(self) -> None:
        """Close it for good; what it has shown so far counts."""
        self.is_live = False
        self.close()

    def close(self) -> None:
        """Stop its workers."""
        self.resume()
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self.loader is not None:
            shut = getattr(iterator, "_shutdown_workers", None)
            if shut is not None:
                shut()
            if getattr(self.loader, "_iterator", None) is iterator:
                self.loader._iterator = None
        self._pids = []

    def _note_workers(self) -> None:
        processes = getattr(self._iterator, "_workers", [])
        self._pids = [process.pid for process in processes if getattr(process, "pid", None)]

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class InlineSource(BatchSource):
    """A loader without workers."""

    starts_processes = False

    @property
    def runs_in_this_process(self) -> bool:
        """Whether the dataset is called in this process."""
        return True


class RepeatedBatchSource(BatchSource):
    """The same batch every time: what the loop does when loading is free."""

    starts_processes = False

    def __init__(self, name: str, *, line: str = "") -> None:
        super().__init__(name, _no_loader, line=line)
        self.batch: Any = None

    def open(self) -> None:
        """Do nothing."""

    def warm_up(self) -> None:
        """Do nothing."""

    def next_batch(self) -> Any:
        """Return the batch in new containers, because a step may take them apart."""
        return copy_containers(self.batch)


class ThreadSource(BatchSource):
    """A loader whose workers are threads; while it is paused, they stop before their next sample."""

    starts_processes = False

    def pause(self) -> None:
        """Stop its threads, each when it has made its sample, and wait for that: the next source may fork."""
        gate = self._gate
        if gate is not None:
            gate.pause()

    def resume(self) -> None:
        """Let its threads continue."""
        gate = self._gate
        if gate is not None:
            gate.resume()

    @property
    def _gate(self) -> ThreadGate | None:
        gate: ThreadGate | None = self._iterator.pipeline.thread_gate if self._iterator is not None else None
        return gate


def _why_empty(loader: DataLoader[Any] | None) -> str:
    samples = len(loader.dataset) if loader is not None and hasattr(loader.dataset, "__len__") else 0
    if loader is not None and loader.drop_last and 0 < samples < (loader.batch_size or 0):
        return (
            f"drop_last=True leaves out the only one, of {samples} samples where batch_size is {loader.batch_size}; "
            "take drop_last=True out, or lower batch_size"
        )
    return "give it a dataset and a sampler that have samples"


def _no_loader() -> DataLoader[Any]:
    raise AssertionError("a repeated batch has no loader")
