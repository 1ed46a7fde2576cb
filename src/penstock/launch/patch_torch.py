"""Replaces torch's DataLoader by penstock's as soon as the program imports torch.

Importing torch here would be simpler, and wrong: torch reads settings such as OMP_NUM_THREADS while it is imported, and
a program may set them before its own `import torch`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

Observer = Callable[["DataLoader[Any]"], None]

_MODULES = ("torch.utils.data", "torch.utils.data.dataloader")
_TORCHDATA = "torchdata.stateful_dataloader"
_TORCHDATA_MODULES = (_TORCHDATA, f"{_TORCHDATA}.stateful_dataloader")


def replace_torch_loader(observer: Observer, *, distributed: bool = False) -> None:
    """Make `from torch.utils.data import DataLoader` return penstock's, and call `observer` with each loader.

    torchdata's StatefulDataLoader is replaced too: penstock's loader has a state_dict as well.

    Args:
        observer: called with each new loader.
        distributed: whether a loader that shuffles and has no sampler shards its samples over ranks.
    """
    on_import("torch", lambda: _replace(observer, distributed=distributed))
    on_import(_TORCHDATA, lambda: _replace_stateful(distributed=distributed))


def restore_torch_loader(observer: Observer) -> None:
    """Undo `replace_torch_loader`. Existing loaders keep their class."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImportHook)]
    if "penstock.loader.dataloader" not in sys.modules:
        return
    from penstock.loader import dataloader

    if observer in dataloader.observers:
        dataloader.observers.remove(observer)
    for name in _MODULES:
        importlib.import_module(name).DataLoader = dataloader.DataLoader.__base__  # type: ignore[attr-defined]
    for name, original in _torchdata_classes.items():
        importlib.import_module(name).StatefulDataLoader = original  # type: ignore[attr-defined]
    _torchdata_classes.clear()


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


def _replace(observer: Observer, *, distributed: bool) -> None:
    from penstock.loader import dataloader

    dataloader.observers.append(observer)
    for name in _MODULES:
        importlib.import_module(name).DataLoader = _loader_class(distributed=distributed)  # type: ignore[attr-defined]


def _loader_class(*, distributed: bool) -> type[DataLoader[Any]]:
    from penstock.loader.dataloader import DataLoader

    if not distributed:
        return DataLoader
    from penstock.launch.auto_distributed import AutoDistributed

    return AutoDistributed


_torchdata_classes: dict[str, Any] = {}
"""torchdata's own classes, by the modules in which they were replaced."""


def _replace_stateful(*, distributed: bool) -> None:
    for name in _TORCHDATA_MODULES:
        module: Any = importlib.import_module(name)
        _torchdata_classes[name] = module.StatefulDataLoader
        module.StatefulDataLoader = _loader_class(distributed=distributed)


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
