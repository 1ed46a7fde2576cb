"""Leases of cached copies: each process records the copies that it was given paths of, so that they are not removed.

    leases/MACHINE.PID.START    the names of copies, one per line; START is the process's start time, as PIDs are reused

The leases of a process that has ended are removed. Whether a process of another machine or container has ended cannot
be determined here: its leases hold for a day. A path is so valid while the process lives that asked for it, and in its
workers, which do not outlive it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from penstock.core.private_files import make_folder, open_file

FOLDER = "leases"
_DAY_S = 86_400.0
_added: set[tuple[str, str]] = set()


def add(folder: str, name: str) -> None:
    """Record that this process needs a copy."""
    path = os.path.join(folder, FOLDER, _process_id(os.getpid()))
    if (path, name) in _added and os.path.exists(path):
        return
    make_folder(os.path.dirname(path))
    with open(open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    _added.add((path, name))


def leased_names(folder: str) -> set[str]:
    """Return the names of all copies that a living process needs."""
    found: set[str] = set()
    for path in _leases(folder):
        if _is_living(path):
            with suppress(FileNotFoundError), open(open_file(path, os.O_RDONLY), encoding="utf-8") as file:
                found.update(file.read().splitlines())
    return found


def remove_expired(folder: str) -> None:
    """Remove the leases of processes that have ended."""
    for path in _leases(folder):
        if not _is_living(path):
            with suppress(FileNotFoundError, PermissionError):
                os.unlink(path)


def _leases(folder: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(os.path.join(folder, FOLDER)) as entries:
        yield from (entry.path for entry in entries)


def _is_living(path: str) -> bool:
    name = os.path.basename(path)
    machine, _, pid = name.rpartition(".")[0].rpartition(".")
    if machine == _machine_id():
        return pid.isdecimal() and name == _process_id(int(pid))
    with suppress(FileNotFoundError):
        return time.time() - os.stat(path).st_mtime < _DAY_S
    return False


def _process_id(pid: int) -> str:
    """Return the name of a process's lease file; one that has ended gets a name that no process has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            start = file.read().rpartition(")")[2].split()[19]
    except OSError:
        start = "ended"
    return f"{_machine_id()}.{pid}.{start}"


def _machine_id() -> str:
    """Return the host name and the PID namespace: containers of one host number their processes separately."""
    return f"{os.uname().nodename}-{os.stat('/proc/self/ns/pid').st_ino}"
