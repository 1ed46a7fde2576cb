"""Whether a process is alive, stopped or exiting, and when it started: fields of /proc/PID/stat.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

from pathlib import Path

_PF_EXITING = 0x4
"""Of the kernel's include/linux/sched.h; a bit of the field `flags`."""


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    A pid and its start identify a process: the kernel gives the number of a dead process away again.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields is not None and fields[0] != "Z" else None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by Ctrl-Z."""
    fields = _stat(pid)
    return fields is not None and fields[0] in "tT"


def is_exiting(pid: int) -> bool:
    """Return whether a process has ended or is about to: the kernel closes its files before it notifies anybody."""
    fields = _stat(pid)
    return fields is None or bool(int(fields[6]) & _PF_EXITING)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the command name before the bracket may hold spaces and brackets
