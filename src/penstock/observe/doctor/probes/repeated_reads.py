"""Which file or folder sample after sample reads again, and how much of their time the function that reads it takes.

Python tells its audit hooks (PEP 578) of every file that is opened and every folder that is listed, also by NumPy,
torch and pandas, which open files as Python does.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.user_code import line_text
from penstock.observe.doctor.probe_results import RepeatedRead
from penstock.observe.doctor.probes.line_sampler import LineSampler, find_line

_REPEATED_SAMPLES = 5
"""Samples: a file that fewer of them read may be theirs by chance."""
_REPEATED_FRACTION = 0.9
"""Of the samples: what nearly all read does not depend on the sample, but for a shard of many samples."""

_FOLDER_EVENTS = ("os.listdir", "os.scandir")
_NOT_DATA = ("/dev/", "/proc/", "/sys/")
_WRITES = os.O_WRONLY | os.O_RDWR


class ReadRecorder:
    """Notes what the thread that made it opens and lists, sample by sample."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._indices: set[str] = set()
        self._index = ""
        self._seen: dict[tuple[str, bool], tuple[set[str], tuple[str, int, str]]] = {}

    @contextmanager
    def sample(self, index: object) -> Iterator[None]:
        """Note what is read inside of the `with` block, which makes the sample `index`."""
        self._index = str(index)
        self._indices.add(self._index)
        _listen_to(self)
        try:
            yield
        finally:
            _listen_to(None)

    def result(self, lines: LineSampler) -> RepeatedRead | None:
        """Return what nearly all samples read, with the part of their time that `lines` saw there; None if nothing."""
        found = []
        for (path, is_folder), (indices, (file, number, function)) in self._seen.items():
            if len(indices) < max(_REPEATED_SAMPLES, _REPEATED_FRACTION * len(self._indices)):
                continue
            name, line = os.path.basename(path.rstrip("/")) or path, line_text(file, number)
            fraction = lines.fraction_of(file, function)
            found.append(
                RepeatedRead(name=name, is_folder=is_folder, line=line, fraction=fraction, samples=len(indices))
            )
        return max(found, key=lambda one: one.fraction, default=None)

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of Python's, if it reads data for this sample."""
        if threading.get_ident() != self._thread_id or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(_NOT_DATA) or (event == "open" and _writes(*arguments[1:3])):
            return
        line = find_line(sys._getframe(2))
        if line is not None:
            indices, _ = self._seen.setdefault((path, event in _FOLDER_EVENTS), (set(), line))
            indices.add(self._index)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITES)


_recorder: ReadRecorder | None = None


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_on_event)  # for good: Python has no way to take one out


def _listen_to(recorder: ReadRecorder | None) -> None:
    global _recorder
    _install_hook()
    _recorder = recorder


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    recorder = _recorder
    if recorder is not None and arguments and (event == "open" or event in _FOLDER_EVENTS):
        recorder.note(event, arguments)
