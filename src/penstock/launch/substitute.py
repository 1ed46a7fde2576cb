"""Puts penstock's DataLoader in the place of torch's, when the program has imported torch and not sooner.

Importing torch for the program would be simpler, and wrong: some of what a program sets before its `import torch`
(OMP_NUM_THREADS, for one) is read while torch is imported.
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
    from penstock.feed.loader import DataLoader

Observer = Callable[["DataLoader[Any]"], None]

_HOMES = ("torch.utils.data", "torch.utils.data.dataloader")
_TORCHDATA = "torchdata.stateful_dataloader"
_TORCHDATA_HOMES = (_TORCHDATA, f"{_TORCHDATA}.stateful_dataloader")


def replace_torch_loader(observer: Observer, *, distributed: bool = False) -> None:
    """Let `from torch.utils.data import DataLoader` give penstock's from now on, and `observer` see each one made.

    torchdata's StatefulDataLoader is replaced, too: penstock's keeps a state as well.

    Args:
        observer: called with each loader.
        distributed: whether a loader that shuffles, and has no sampler of its own, shares out its samples over ranks.
    """
    after_import("torch", lambda: _replace(observer, distributed=distributed))
    after_import(_TORCHDATA, lambda: _replace_stateful(distributed=distributed))


def put_torch_loader_back(observer: Observer) -> None:
    """Undo `replace_torch_loader`. Loaders that were made meanwhile stay what they are."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _After)]
    if "penstock.feed.loader" not in sys.modules:
        return
    from penstock.feed import loader

    if observer in loader.observers:
        loader.observers.remove(observer)
    for name in _HOMES:
        importlib.import_module(name).DataLoader = loader.DataLoader.__base__  # type: ignore[attr-defined]
    for name, original in _replaced.items():
        importlib.import_module(name).StatefulDataLoader = original  # type: ignore[attr-defined]
    _replaced.clear()


def after_torch(then: Callable[[], None]) -> None:
    """Call `then` as soon as torch is imported: now, if it is already. What was given first is called first."""
    after_import("torch", then)


def after_import(module: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as a module is imported; see `after_torch`."""
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _After) and finder.module == module]
    if module in sys.modules:
        then()
    elif waiting:
        waiting[0].then.append(then)
    else:
        sys.meta_path.insert(0, _After(module, [then]))


def _replace(observer: Observer, *, distributed: bool) -> None:
    from penstock.feed import loader

    loader.observers.append(observer)
    for name in _HOMES:
        importlib.import_module(name).DataLoader = _kind(distributed=distributed)  # type: ignore[attr-defined]


def _kind(*, distributed: bool) -> type[DataLoader[Any]]:
    from penstock.feed.loader import DataLoader

    if not distributed:
        return DataLoader
    from penstock.launch.sharing import SharedOut

    return SharedOut


_replaced: dict[str, Any] = {}
"""torchdata's own classes, by the modules in which they were replaced."""


def _replace_stateful(*, distributed: bool) -> None:
    for name in _TORCHDATA_HOMES:
        home: Any = importlib.import_module(name)
        _replaced[name] = home.StatefulDataLoader
        home.StatefulDataLoader = _kind(distributed=distributed)


class _After(MetaPathFinder):
    """Finds a module as the finders behind it do, and calls all of `then` when it has been imported."""

    def __init__(self, module: str, then: list[Callable[[], None]]) -> None:
        self.module = module
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that tells us; None for any other module."""
        if fullname != self.module:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        sys.meta_path.remove(self)
        for each in self.then:
            each()


class _Followed(Loader):
    """A loader that calls `then` when its module has run; it leaves no trace in the module."""

    def __init__(self, inner: Loader, then: Callable[[], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()
