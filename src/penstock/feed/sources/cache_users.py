"""Which copies of a cache are needed, and by whom: a note for each process that was given paths.

    users/MACHINE.PID.START    the names of copies, a line each; START tells a process from a later one with its number

A process that has ended needs nothing, and its note is removed. Of one on another machine, or in another container,
nobody here can say whether it has: its note holds for a day. A path may so be kept, and opened whenever it is wanted,
as long as the process lives that asked for it; its workers live no longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

FOLDER = "users"
_DAY_S = 86_400.0
_noted: set[tuple[str, str]] = set()


def note(folder: str, name: str) -> None:
    """Note that this process needs a copy."""
    path = os.path.join(folder, FOLDER, _of_process(os.getpid()))
    if (path, name) in _noted and os.path.exists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, f"{name}\n".encode())
    finally:
        os.close(descriptor)
    _noted.add((path, name))


def needed(folder: str) -> set[str]:
    """Return the names of all copies that are needed."""
    found: set[str] = set()
    for path in _notes(folder):
        if _is_living(path):
            with suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
                found.update(file.read().splitlines())
    return found


def clean_up(folder: str) -> None:
    """Remove the notes of processes that have ended."""
    for path in _notes(folder):
        if not _is_living(path):
            with suppress(FileNotFoundError, PermissionError):
                os.unlink(path)


def _notes(folder: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(os.path.join(folder, FOLDER)) as entries:
        yield from (entry.path for entry in entries)


def _is_living(path: str) -> bool:
    name = os.path.basename(path)
    machine, _, pid = name.rpartition(".")[0].rpartition(".")
    if machine == _machine():
        return pid.isdecimal() and name == _of_process(int(pid))
    with suppress(FileNotFoundError):
        return time.time() - os.stat(path).st_mtime < _DAY_S
    return False


def _of_process(pid: int) -> str:
    """Return what the note of a process is called; of one that has ended the name is no process's."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            start = file.read().rpartition(")")[2].split()[19]
    except OSError:
        start = "ended"
    return f"{_machine()}.{pid}.{start}"


def _machine() -> str:
    """Return this machine's name, and that of its container's pid of processes."""
    return f"{os.uname().nodename}-{os.stat('/proc/self/ns/pid').st_ino}"
