"""What this machine's parts cost: each measured separately, in settings that no prediction is checked against."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.jpegs import jpeg_workload
from penstock.core.shared_segment import PrivateSegment

_COPIED_NBYTES = 32 << 20
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """What a worker spends in addition to making samples, for one shape of sample; seconds."""

    task_s: float
    row_s: float


@dataclass(frozen=True, kw_only=True)
class ImageCost:
    """A JPEG file of 500x375 that becomes 3x224x224 uint8 (`benchmarks.jpegs`)."""

    decode_s: float
    stored_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the formulas need to know about a machine; in seconds unless the name has another unit."""

    cores: int
    sleep_extra_s: float
    """How much longer a sleep lasts than requested."""

    burn_extra_s: float
    """How much longer a sample that burns a core's time lasts than requested."""

    handling_s: float
    """The loop's thread, for a batch in a single task."""

    result_s: float
    """The loop's thread, for each further task; `handling_s` includes the first one."""

    worker_costs: Mapping[str, WorkerCost]
    copy_gb_per_s: float
    """One thread, from memory into a slot."""

    receive_gb_per_s: float
    """One thread, from a TCP connection within this machine into a slot, another one sending."""

    image: ImageCost


def sleep_extra_s(seconds: float = 0.002, times: int = 500) -> float:
    """Measure how much longer a sleep lasts than requested."""
    return _mean_s(lambda: time.sleep(seconds), times) - seconds


def burn_extra_s(seconds: float = 0.002, times: int = 250) -> float:
    """Measure how much longer burning a core's time takes in wall time."""

    def burn() -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    return max(0.0, _mean_s(burn, times) - seconds)


def line(x: tuple[float, float], y: tuple[float, float]) -> tuple[float, float]:
    """Return the intercept and the slope of the line through two points; neither is negative, because they are costs.

    >>> line((1.0, 3.0), (5.0, 9.0))
    (3.0, 2.0)
    """
    slope = max(0.0, (y[1] - y[0]) / (x[1] - x[0]))
    return max(0.0, y[0] - slope * x[0]), slope


def copy_gb_per_s(rounds: int = 9) -> float:
    """Measure how fast one thread copies 32 MiB into a slot that has been used before."""
    source = np.ones(_COPIED_NBYTES, np.uint8)
    slot = np.frombuffer(PrivateSegment(_COPIED_NBYTES).memory, np.uint8)

    def copy() -> None:
        slot[:] = source

    copy()
    return _COPIED_NBYTES / 1e9 / statistics.median(_mean_s(copy, 1) for _ in range(rounds))


def receive_gb_per_s(rounds: int = 9) -> float:
    """Measure how fast one thread receives 32 MiB into a slot, from another over TCP within this machine."""
    slot = memoryview(PrivateSegment(_COPIED_NBYTES).memory)
    source = bytes(_COPIED_NBYTES)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:

            def receive() -> None:
                sending = threading.Thread(target=sender.sendall, args=(source,))
                sending.start()
                got = 0
                while got < _COPIED_NBYTES:
                    got += receiver.recv_into(slot[got : got + _MEBIBYTE])
                sending.join()

            receive()
            return _COPIED_NBYTES / 1e9 / statistics.median(_mean_s(receive, 1) for _ in range(rounds))


def measure_image() -> ImageCost:
    """Measure what decoding an image takes."""
    with jpeg_workload(batches=2) as workload:
        dataset: Any = workload.dataset
        taken = [_mean_s(lambda index=index: dataset[index], 1) for index in range(workload.samples)]  # type: ignore[misc]
        nbytes = statistics.mean(os.path.getsize(path) for path in dataset.paths)
    return ImageCost(decode_s=statistics.median(taken), stored_nbytes=round(nbytes))


def _mean_s(function: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - began) / times
