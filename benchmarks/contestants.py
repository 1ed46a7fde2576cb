"""Who is compared: penstock, torch's DataLoader, and whoever of the field is installed, behind one protocol."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from benchmarks.workloads import Workload

WORKERS = 2
"""Workers on both sides, everywhere: the reference machine has 4 cores, and the consumer needs one."""


class Epochs(Protocol):
    """A loader opened on a workload; each pass over it is one epoch of batches (tensors or arrays)."""

    def __iter__(self) -> Iterator[Any]: ...


class Contestant(Protocol):
    """A loader in its natural configuration.

    `missing` is asked once, in the process that reports; `suits` before each row; `open` in the process that measures,
    after the workload was made. Leaving what `open` returned must end every process and thread that it started.
    """

    name: str

    def missing(self) -> str | None:
        """Say why this contestant cannot run here, or return None."""

    def suits(self, workload: Workload) -> bool:
        """Say whether it can load `workload` in its natural way."""

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> AbstractContextManager[Epochs]:
        """Start loading: `persistent` workers outlive an epoch, `method` is how processes start."""


class Held:
    """A loader that stops when nobody holds it any more, as torch's does, and this its one holder."""

    def __init__(self, loader: Epochs) -> None:
        self._loader: Epochs | None = loader

    def __enter__(self) -> Held:
        return self

    def __iter__(self) -> Iterator[Any]:
        assert self._loader is not None
        return iter(self._loader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader = None
        gc.collect()


class DropIn:
    """A class that takes the arguments of torch's DataLoader: torch's own, and penstock's."""

    def __init__(self, name: str, module: str, **extra: Any) -> None:
        self.name = name
        self._module = module
        self._extra = extra

    def missing(self) -> str | None:
        try:
            self.loader_class()
        except (ImportError, AttributeError) as error:
            return f"not installed ({error})"
        return None

    def suits(self, workload: Workload) -> bool:
        return True

    def loader_class(self) -> type[Any]:
        """Import and return the class."""
        found: type[Any] = importlib.import_module(self._module).DataLoader
        return found

    def open(
        self, workload: Workload, *, workers: int = WORKERS, persistent: bool = True, method: str | None = None
    ) -> Held:
        return Held(
            self.loader_class()(
                workload.dataset,
                batch_size=workload.batch_size,
                num_workers=workers,
                persistent_workers=persistent and workers > 0,
                multiprocessing_context=method,
                **self._extra,
            )
        )


OURS = DropIn("penstock", "penstock")
TORCH = DropIn("torch", "torch.utils.data")
