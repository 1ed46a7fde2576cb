"""One protocol over the loaders that are compared: penstock, torch's DataLoader, and the installed peers."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from benchmarks.workloads import Workload

WORKERS = 2
"""Workers of every loader, everywhere: the reference machine has 4 cores, and the consumer needs one."""


class Epochs(Protocol):
    """A loader opened on a workload; each pass over it is one epoch of batches (tensors or arrays)."""

    def __iter__(self) -> Iterator[Any]: ...


class LoaderAdapter(Protocol):
    """Opens a loader on a workload, in the configuration that its documentation recommends.

    `why_unavailable` is called once, in the process that reports; `supports` before each case; `open` in the process
    that measures, after the workload was made. Leaving the context that `open` returned must end every process and
    thread that it started.
    """

    name: str

    def why_unavailable(self) -> str | None:
        """Return why this loader cannot run here, or None."""

    def supports(self, workload: Workload) -> bool:
        """Return whether the loader can load `workload` without a workaround."""

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> AbstractContextManager[Epochs]:
        """Start loading; `persistent` workers outlive an epoch, `method` is the start method of processes."""


class OpenLoader:
    """The only reference to a loader that stops when it is garbage-collected, as torch's does."""

    def __init__(self, loader: Epochs) -> None:
        self._loader: Epochs | None = loader

    def __enter__(self) -> OpenLoader:
        return self

    def __iter__(self) -> Iterator[Any]:
        assert self._loader is not None
        return iter(self._loader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader = None
        gc.collect()


class DataLoaderAdapter:
    """Opens a class that takes the arguments of torch's DataLoader: torch's own, and penstock's."""

    def __init__(self, name: str, module: str, **extra: Any) -> None:
        self.name = name
        self._module = module
        self._extra = extra

    def why_unavailable(self) -> str | None:
        try:
            self.loader_class()
        except (ImportError, AttributeError) as error:
            return f"not installed ({error})"
        return None

    def supports(self, workload: Workload) -> bool:
        return True

    def loader_class(self) -> type[Any]:
        """Import and return the class."""
        found: type[Any] = importlib.import_module(self._module).DataLoader
        return found

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> OpenLoader:
        return OpenLoader(
            self.loader_class()(
                workload.dataset,
                batch_size=workload.batch_size,
                num_workers=workers,
                persistent_workers=persistent and workers > 0,
                multiprocessing_context=method,
                **self._extra,
            )
        )


OURS = DataLoaderAdapter("penstock", "penstock")
ON_DEMAND = DataLoaderAdapter("penstock, on demand", "penstock", dispatch="demand")
TORCH = DataLoaderAdapter("torch", "torch.utils.data")
