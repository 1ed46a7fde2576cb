"""Replaces torch's DataLoader by penstock's as soon as the program imports torch.

Importing torch here would be simpler, and wrong: torch reads settings such as OMP_NUM_THREADS while it is imported, and
a program may set them before its own `import torch`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.loader.counters import Counters
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.torch_watch import TorchWatch

_MODULES = ("torch.utils.data", "torch.utils.data.dataloader")
_TORCHDATA = "torchdata.stateful_dataloader"
_NODES = "torchdata.nodes"


class LoaderObserver(Protocol):
    """What is called with the loaders of a program."""

    def register(self, loader: Any) -> object:
        """Note a new loader."""

    def find_counters(self, loader: Any, iterator: Any) -> Counters | None:
        """Return the counters for an iterator that is not penstock's; None to leave it uncounted."""


class TorchPatch:
    """Makes `from torch.utils.data import DataLoader` return penstock's.

    torchdata's loaders are left alone, and only watched: a checkpoint with their state must load without penstock, and
    the other way round.

    Args:
        observer: called with each new loader, and each new iterator that is not penstock's.
        distributed: whether a loader that shuffles and has no sampler shards its samples over ranks.
    """

    def __init__(self, observer: LoaderObserver, *, distributed: bool = False) -> None:
        self._observer = observer
        self._distributed = distributed
        self._undo: list[Callable[[], None]] = []
        self._watch: TorchWatch | None = None

    def install(self) -> None:
        """Patch torch as soon as it is imported, at once if it is already; and torchdata."""
        on_import("torch", self._replace)
        on_import(_TORCHDATA, self._watch_stateful)
        on_import(_NODES, self._watch_nodes)

    def remove(self) -> None:
        """Restore torch's classes. Existing loaders keep theirs."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportHook)]
        while self._undo:
            self._undo.pop()()

    def _replace(self) -> None:
        from penstock.loader import dataloader
        from penstock.loader.torch_watch import TorchWatch

        watch = self._watch = TorchWatch(self._observer.find_counters)

        def register(loader: DataLoader[Any]) -> None:
            watch.time_generators(type(loader), dataloader.DataLoader)
            self._observer.register(loader)

        watch.install()
        dataloader.observers.append(register)
        self._undo += [watch.remove, functools.partial(dataloader.observers.remove, register)]
        for name in _MODULES:
            module = importlib.import_module(name)
            self._undo.append(functools.partial(setattr, module, "DataLoader", dataloader.DataLoader.__base__))
            module.DataLoader = _loader_class(distributed=self._distributed)  # type: ignore[attr-defined]

    def _watch_stateful(self) -> None:
        from penstock.launch.watch_torchdata import watch_stateful_loader

        assert self._watch is not None  # torchdata imports torch
        watch_stateful_loader(self._watch, self._observer.register, distributed=self._distributed)

    def _watch_nodes(self) -> None:
        from penstock.launch.watch_torchdata import watch_node_loader

        assert self._watch is not None  # torchdata imports torch
        watch_node_loader(self._watch, self._observer.register)


def _loader_class(*, distributed: bool) -> type[DataLoader[Any]]:
    from penstock.loader.dataloader import DataLoader

    if not distributed:
        return DataLoader
    from penstock.launch.auto_distributed import AutoDistributed

    return AutoDistributed


def on_torch_import(callback: Callable[[], None]) -> None:
    """Call `callback` as soon as torch is imported, at once if it is already; callbacks run in order."""
    on_import("torch", callback)


def on_import(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` as soon as a module is imported; see `on_torch_import`."""
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _ImportHook) and finder.module == module]
    if module in sys.modules:
        callback()
    elif waiting:
        waiting[0].callbacks.append(callback)
    else:
        sys.meta_path.insert(0, _ImportHook(module, [callback]))


class _ImportHook(MetaPathFinder):
    """Finds one module through the finders after it, and calls `callbacks` when its import is complete."""

    def __init__(self, module: str, callbacks: list[Callable[[], None]]) -> None:
        self.module = module
        self.callbacks = callbacks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that notifies this hook; None for any other module."""
        if fullname != self.module:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self._on_imported)
        return spec

    def _on_imported(self) -> None:
        sys.meta_path.remove(self)
        for callback in self.callbacks:
            callback()


class _NotifyingLoader(Loader):
    """Wraps a module's loader, and calls `callback` when the module has run. The module keeps the wrapped loader."""

    def __init__(self, inner: Loader, callback: Callable[[], None]) -> None:
        self._inner = inner
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._callback()
