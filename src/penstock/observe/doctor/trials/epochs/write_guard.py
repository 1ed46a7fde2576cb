"""Keeps a program from changing files while it is only watched: what it would overwrite may be a model of many days.

A program that saves by `torch.save` goes on as if it had. Where it opens a file for writing, deletes, moves, starts
another program or connects to one, or writes through a library that Python cannot look into, it is ended before that.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.observe.doctor.trials.time_budget import TrialsDoneError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = frozenset(
    {
        *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"),
        *("shutil.move", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"),
        *("socket.connect", "sqlite3.connect"),
    }
)
"""Audit events; see Python's table of them."""
_SAVING = (("torch", "save"), ("torch.serialization", "save"))
_WITHOUT_AUDIT = (
    ("torch.serialization", "_open_zipfile_writer"),
    ("torch.jit", "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.numpy", "serialize_file"),
    ("h5py.h5f", "create"),
    ("pyarrow.parquet.core", "ParquetWriter"),
    ("cv2", "imwrite"),
)
_armed: set[int] = set()
"""Threads of which no change is allowed."""


class WriteGuard:
    """Ends the thread that armed it, by a `TrialsDoneError`, before it changes a file."""

    def __init__(self) -> None:
        self._thread = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        self._writes_bytecode = True

    def arm(self) -> None:
        """Begin: of this thread, until `disarm`."""
        _install()
        self._thread = threading.get_ident()
        for module_name, name in (*_SAVING, *_WITHOUT_AUDIT):
            module = sys.modules.get(module_name)
            original = getattr(module, name, None)
            if original is not None:
                self._replaced.append((module, name, original))
                save = _leave_out if (module_name, name) in _SAVING else _end
                setattr(module, name, _guarded(original, save))
        self._writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        _armed.add(self._thread)

    def disarm(self) -> None:
        """End; may be called at any time."""
        _armed.discard(self._thread)
        if self._replaced:
            sys.dont_write_bytecode = self._writes_bytecode
        while self._replaced:
            module, name, before = self._replaced.pop()
            setattr(module, name, before)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow what a loader does to start its workers."""
        was_armed = self._thread in _armed
        _armed.discard(self._thread)
        try:
            yield
        finally:
            if was_armed:
                _armed.add(self._thread)


def _guarded(write: Callable[..., Any], instead: Callable[..., None]) -> Callable[..., Any]:
    def write_if_allowed(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() not in _armed:
            return write(*arguments, **options)
        return instead(*arguments, **options)

    return write_if_allowed


def _leave_out(*_: Any, **__: Any) -> None:
    """Save nothing."""


def _end(*_: Any, **__: Any) -> None:
    raise TrialsDoneError


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if threading.get_ident() not in _armed:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or path == os.devnull or not (flags or 0) & _WRITES:
            return
    elif event not in _CHANGES:
        return
    raise TrialsDoneError


_is_installed = False


def _install() -> None:
    """Add the hook, which Python keeps until it ends."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_on_event)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_armed.clear)  # a worker writes what it likes
