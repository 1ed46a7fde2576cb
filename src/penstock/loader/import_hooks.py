"""Calls functions as soon as the program has imported a module, and imports nothing by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast


def on_import(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` as soon as a module is imported, at once if it is already; callbacks run in order."""
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _ImportHook) and finder.module == module]
    if module in sys.modules:
        callback()
    elif waiting:
        waiting[0].callbacks.append(callback)
    else:
        sys.meta_path.insert(0, _ImportHook(module, [callback]))


def forget_imports(*modules: str) -> None:
    """Call nothing when these modules are imported."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, _ImportHook) and finder.module in modules)
    ]


class _ImportHook:
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
            spec.loader = cast(Any, _NotifyingLoader(spec.loader, self._on_imported))
        return spec

    def _on_imported(self) -> None:
        sys.meta_path.remove(self)
        for callback in self.callbacks:
            callback()


class _NotifyingLoader:
    """Wraps a module's loader, and calls `callback` when the module has run. The module keeps the wrapped loader."""

    def __init__(self, inner: Any, callback: Callable[[], None]) -> None:
        self._inner = inner
        self._callback = callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._callback()
