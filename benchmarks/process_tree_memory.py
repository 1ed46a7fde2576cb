"""Measure the memory of this process and its descendants, including shared memory that no process has mapped.

The kernel's PSS counts mapped pages only. A batch that waits in torch's queue lies in a segment of /dev/shm that its
worker has already unmapped and the main process has not mapped yet: it takes memory that no PSS shows. Such segments
are found through the descriptors that keep them alive. Source: the kernel's Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.observe.meters.host_memory import descendants, pss_nbytes

_SHARED = ("/dev/shm/", "/memfd:")


@dataclass(frozen=True, kw_only=True)
class ProcessTreeMemory:
    """One measurement of all processes."""

    pss_nbytes: int
    """The sum of their proportional set sizes."""

    in_flight_nbytes: int
    """Shared memory that is kept by a descriptor only, mapped by none of the processes."""


def process_tree_memory() -> ProcessTreeMemory:
    """Measure once."""
    pids = [os.getpid(), *descendants(os.getpid())]
    mapped: set[int] = set()
    open_nbytes: dict[int, int] = {}
    for pid in pids:
        with suppress(FileNotFoundError):  # it has just ended
            mapped.update(_mapped_inodes(pid))
            open_nbytes.update(_open_segments(pid))
    return ProcessTreeMemory(
        pss_nbytes=sum(pss_nbytes(pid) or 0 for pid in pids),
        in_flight_nbytes=sum(nbytes for inode, nbytes in open_nbytes.items() if inode not in mapped),
    )


def _mapped_inodes(pid: int) -> Iterator[int]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(_SHARED):
            yield int(words[4])


def _open_segments(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the inode and the bytes in memory of every shared segment that `pid` has a descriptor of."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if os.readlink(descriptor).startswith(_SHARED):
                about = descriptor.stat()
                yield about.st_ino, about.st_blocks * 512
