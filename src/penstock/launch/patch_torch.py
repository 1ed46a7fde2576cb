"""Replaces torch's DataLoader by penstock's as soon as the program imports torch.

Importing torch here would be simpler, and wrong: torch reads settings such as OMP_NUM_THREADS while it is imported, and
a program may set them before its own `import torch`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from penstock.loader.import_hooks import forget_imports, on_import

if TYPE_CHECKING:
    from penstock.loader.counters import Counters
    from penstock.loader.dataloader import DataLoader
    from penstock.observe.live.torch_watch import TorchWatch

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
    """

    def __init__(self, observer: LoaderObserver) -> None:
        self._observer = observer
        self._undo: list[Callable[[], None]] = []
        self._watch: TorchWatch | None = None

    def install(self) -> None:
        """Patch torch as soon as it is imported, at once if it is already; and torchdata."""
        on_import("torch", self._replace)
        on_import(_TORCHDATA, self._watch_stateful)
        on_import(_NODES, self._watch_nodes)

    def remove(self) -> None:
        """Restore torch's classes. Existing loaders keep theirs."""
        forget_imports("torch", _TORCHDATA, _NODES)
        while self._undo:
            self._undo.pop()()

    def _replace(self) -> None:
        from penstock.loader import dataloader
        from penstock.observe.live.torch_watch import TorchWatch

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
            module.DataLoader = dataloader.DataLoader  # type: ignore[attr-defined]

    def _watch_stateful(self) -> None:
        from penstock.launch.watch_torchdata import watch_stateful_loader

        assert self._watch is not None  # torchdata imports torch
        watch_stateful_loader(self._watch, self._observer.register)

    def _watch_nodes(self) -> None:
        from penstock.launch.watch_torchdata import watch_node_loader

        assert self._watch is not None  # torchdata imports torch
        watch_node_loader(self._watch, self._observer.register)


def on_torch_import(callback: Callable[[], None]) -> None:
    """Call `callback` as soon as torch is imported, at once if it is already; callbacks run in order."""
    on_import("torch", callback)
