"""Where a conducted loop's batches come from: its own loader, another in its place, or one batch again and again."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.feed.loader import DataLoader as PenstockLoader
from penstock.observe.trial import AS_IT_IS

iterate: Callable[[DataLoader[Any]], Any] = DataLoader.__iter__
"""What iterating over a loader does when nobody watches."""


class Source:
    """A loader, epoch after epoch, that can be stopped between two batches."""

    starts_processes = True

    def __init__(self, name: str, make: Callable[[], DataLoader[Any]], *, line: str = "") -> None:
        self.name = name
        self.line = line
        self.failure = ""
        self.is_live = True
        self.is_settled = name == AS_IT_IS
        self.startup_s: float | None = None
        self._restarts_s: list[float] = []
        self.loader: DataLoader[Any] | None = None
        self._make = make
        self._iterator: Any = None
        self._pids: list[int] = []

    @property
    def runs_here(self) -> bool:
        """Whether the dataset runs in this process."""
        return False

    @property
    def restart_s(self) -> float | None:
        """Median seconds from asking for more than an epoch's last batch to the first of another; None before that."""
        return statistics.median(self._restarts_s) if self._restarts_s else None

    @property
    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._iterator is not None

    @property
    def ahead(self) -> int:
        """How many batches it may have made ahead."""
        return self.loader.num_workers * (self.loader.prefetch_factor or 0) if self.loader is not None else 0

    def open(self) -> None:
        """Make the loader and start its workers.

        Raises:
            Exception: the loader's, as where its dataset cannot be pickled.
        """
        if self._iterator is not None:
            return
        began = time.perf_counter()
        self.loader = self.loader or self._make()
        self._iterator = iterate(self.loader)
        self._opened_s = time.perf_counter() - began
        self._note_workers()

    def warm(self) -> None:
        """Draw what comes before workers are in step."""
        self.open()
        for _ in range(max(1, self.loader.num_workers) if self.loader is not None else 0):
            self.next_batch()

    def next_batch(self) -> Any:
        """Return the next batch; after the last of an epoch, the first of another.

        Raises:
            RuntimeError: an epoch has no batch.
            Exception: the loader's.
        """
        self.open()
        began = time.perf_counter()
        is_again = False
        for _ in range(2):
            try:
                batch = next(self._iterator)
                break
            except StopIteration:
                is_again = True
                self._iterator = iterate(self.loader)  # type: ignore[arg-type]
                self._note_workers()
        else:
            raise RuntimeError("an epoch of this loader has no batch; nothing can be examined")
        if is_again:
            self._restarts_s.append(time.perf_counter() - began)
        if self.startup_s is None:
            self.startup_s = self._opened_s + time.perf_counter() - began
        return batch

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return self._pids

    def pause(self) -> None:
        """Stop its workers where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def fail(self, error: Exception) -> None:
        """Close it for good, because of `error`."""
        self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        self.retire()

    def retire(self) -> None:
        """Try it no further."""
        self.is_live = False
        self.close()

    def close(self) -> None:
        """End its workers."""
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


class Inline(Source):
    """A loader without workers."""

    starts_processes = False

    @property
    def runs_here(self) -> bool:
        """Whether the dataset runs in this process."""
        return True


class Repeated(Source):
    """The same batch again and again: what a loop does when loading is free."""

    starts_processes = False

    def __init__(self, name: str) -> None:
        super().__init__(name, _no_loader)
        self.batch: Any = None

    def open(self) -> None:
        """Do nothing."""

    def warm(self) -> None:
        """Do nothing."""

    def next_batch(self) -> Any:
        """Return the batch in containers of its own, so that a step may take it apart."""
        return in_new_containers(self.batch)


class Gated(Source):
    """A loader whose workers are threads; they wait before their next sample while it is paused."""

    starts_processes = False

    def __init__(self, name: str, make: Callable[[Any], DataLoader[Any]], dataset: Any, *, line: str) -> None:
        self._gate = Gate(dataset)
        super().__init__(name, lambda: make(self._gate), line=line)

    def pause(self) -> None:
        """Close the gate."""
        self._gate.opened.clear()

    def resume(self) -> None:
        """Open it."""
        self._gate.opened.set()


class Gate:
    """A dataset behind a gate."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.opened = threading.Event()
        self.opened.set()
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._getitems

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        self.opened.wait()
        return self._dataset[index]

    def _getitems(self, indices: Any) -> Any:
        self.opened.wait()
        return self._dataset.__getitems__(indices)


def variant(loader: DataLoader[Any], *, penstock: bool | None = None, **changes: Any) -> DataLoader[Any]:
    """Return a loader like `loader` but for `changes`; of penstock's class or torch's, or as it is."""
    is_penstock = isinstance(loader, PenstockLoader) if penstock is None else penstock
    own = _penstocks_own(loader) if isinstance(loader, PenstockLoader) else {}
    options: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        **_sampling(loader),
        **own,
        **changes,
    }
    if not options["num_workers"]:
        options.update(multiprocessing_context=None, prefetch_factor=None, persistent_workers=False, timeout=0)
    if options.get("workers") == "thread":
        options.update(multiprocessing_context=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # which many are too many is being found out
        return PenstockLoader(**options) if is_penstock else DataLoader(**options)


def _penstocks_own(loader: PenstockLoader[Any]) -> dict[str, Any]:
    return {
        "pin_memory": loader._pins,
        "workers": loader._cluster_address or loader._body,
        "dispatch": loader._dispatch_option,
        "errors": loader._errors,
        "keep_batch_size": loader._keep_batch_size,
        "max_deaths": loader._max_deaths,
        "ring_bytes": loader._ring_bytes,
        "device": loader._device,
        "device_bytes": loader._device_bytes,
        "seed": loader.seed,
    }


def _sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    return {"batch_size": None, "sampler": loader.sampler}


def in_new_containers(batch: Any, *, copied: bool = False) -> Any:
    """Return `batch` with the same tensors, or copies of them, in lists and dictionaries of its own."""
    return torch.utils._pytree.tree_map(_copy if copied else _same, batch)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two batches hold the same values.

    >>> are_equal({"x": torch.ones(2), "y": [1]}, {"x": torch.ones(2), "y": [1]})
    True
    """
    leaves, others = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_equal, leaves, others))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(np.all(one == other))


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _same(leaf: Any) -> Any:
    return leaf


def _no_loader() -> DataLoader[Any]:
    raise AssertionError("this source needs no loader")
