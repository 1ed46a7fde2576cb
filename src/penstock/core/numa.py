"""Which cores and which memory are near a device, on machines with several NUMA nodes.

A GPU is attached to one node. Host memory of another node, and the processes that fill it, reach the GPU over the link
between the sockets. Both are preferences: where the system refuses (a container without CAP_SYS_NICE), everything works
as without them, and `prefer_memory` returns False.

Sources: the kernel's `Documentation/ABI/stable/sysfs-devices-node` and `testing/sysfs-bus-pci`, mbind(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import numpy as np

_SYS = Path("/sys")
_PREFERRED = 1  # MPOL_PREFERRED: pages of this node while it has any
_MBIND = {"x86_64": 237, "aarch64": 235}
_WORD_BITS = 64


def cores_by_node(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """Return the cores of every NUMA node that has some; empty if the system does not list them."""
    found = {}
    for path in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        cores = _parse_cpulist((path / "cpulist").read_text())
        if cores:
            found[int(path.name.removeprefix("node"))] = cores
    return found


def node_of_pci(address: str, sys: Path = _SYS) -> int | None:
    """Return the node of the PCI device at `address` ("0000:3b:00.0"); None if unknown, or if there is one node."""
    try:
        node = int((sys / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and len(cores_by_node(sys)) > 1 else None


def cores_near(node: int | None, workers: int, sys: Path = _SYS) -> frozenset[int] | None:
    """Return the cores for `workers` processes that serve `node`; None for all cores.

    All cores if the node has fewer than `workers` that this process may use: being near is worth less than a core for
    each worker.
    """
    if node is None:
        return None
    near = cores_by_node(sys).get(node, frozenset()) & os.sched_getaffinity(0)
    return near if len(near) >= workers else None


def prefer_memory(memory: memoryview, node: int) -> bool:
    """Prefer pages from `node` for `memory` (page-aligned, none touched yet); return whether the system accepted.

    For a shared segment the preference belongs to the segment: it holds for pages that other processes touch first.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not memory:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    address = np.frombuffer(memory, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(len(memory)),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(words * _WORD_BITS + 1),  # the kernel reads one bit fewer
        ctypes.c_uint(0),
    )
    return bool(result == 0)


def _parse_cpulist(text: str) -> frozenset[int]:
    """Return the numbers in a list in the kernel's format.

    >>> sorted(_parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
