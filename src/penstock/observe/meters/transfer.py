"""Measures what copying a batch costs on this machine: `penstock doctor --transfer`. transfer_report.py explains it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.core.shared_segment import PrivateSegment
from penstock.device import Device, TensorSpec
from penstock.loader.counters import Counters
from penstock.loader.to_device.prefetch import Prefetcher
from penstock.observe.meters.transfer_report import CopyTiming, TransferReport

_ROUNDS, _WARMUP_ROUNDS = 15, 2
_STEPS, _STEP_ROUNDS = 12, 5


def measure_transfer(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> TransferReport:
    """Time copies of a batch of `shape` and `dtype` to `device`; takes some seconds.

    Example:
        >>> from penstock.device import device_of
        >>> report = measure_transfer((8, 256), torch.float32, device_of("cpu"))
        >>> report.nbytes
        8192
    """
    batch = torch.zeros(shape, dtype=dtype)
    segment = PrivateSegment(max(4096, batch.nbytes))
    slot = torch.frombuffer(np.frombuffer(segment.memory, np.uint8), dtype=dtype, count=batch.numel()).view(shape)
    host_copies = [
        _time_copy("fresh memory", lambda: batch.clone()),
        _time_copy("slot", lambda: slot.copy_(batch)),
    ]
    if device.is_host:
        return TransferReport(device=device.name, nbytes=batch.nbytes, host_copies=host_copies)
    registration = device.register(segment.memory)
    try:
        with device.outside_capture():
            return _measured_report(device, batch, slot, host_copies, is_pinned=registration is not None)
    finally:
        if registration is not None:
            registration.close()


def _measured_report(
    device: Device, batch: torch.Tensor, slot: torch.Tensor, host_copies: list[CopyTiming], *, is_pinned: bool
) -> TransferReport:
    copies = _time_device_copies(device, batch, slot, is_pinned=is_pinned)
    step_s = _time_steps(device, slot, copies[-1].total_s) if device.torch_device.type != "cpu" else {}
    return TransferReport(
        device=device.name, nbytes=batch.nbytes, host_copies=host_copies, device_copies=copies, step_s=step_s
    )


def _time_device_copies(
    device: Device, batch: torch.Tensor, slot: torch.Tensor, *, is_pinned: bool
) -> list[CopyTiming]:
    target = device.empty(TensorSpec.of(batch))

    def copy(source: torch.Tensor, *, wait: bool) -> Callable[[], Any]:
        def run() -> Any:
            event = device.upload([(target, source)], device.record_event())
            if wait:
                event.synchronize()
            return event

        return run

    copies = [
        _time_copy("pageable memory", copy(batch, wait=True)),
        _time_copy("pageable memory", copy(batch, wait=False), non_blocking=True),
    ]
    if device.torch_device.type != "cpu":
        pinned = batch.pin_memory()
        copies += [
            _time_copy("pinned on the way", lambda: copy(batch.pin_memory(), wait=True)()),
            _time_copy("memory pinned by torch", copy(pinned, wait=True)),
            _time_copy("memory pinned by torch", copy(pinned, wait=False), non_blocking=True),
        ]
    name = "slot" if is_pinned else "slot (could not be pinned)"
    copies += [_time_copy(name, copy(slot, wait=True)), _time_copy(name, copy(slot, wait=False), non_blocking=True)]
    return copies


def _time_copy(source: str, copy: Callable[[], Any], *, non_blocking: bool = False) -> CopyTiming:
    calls_s, totals_s = [], []
    for number in range(_WARMUP_ROUNDS + _ROUNDS):
        began = time.perf_counter()
        event = copy()
        returned = time.perf_counter()
        if non_blocking:
            event.synchronize()
        ended = time.perf_counter()
        if number >= _WARMUP_ROUNDS:
            calls_s.append(returned - began)
            totals_s.append(ended - began)
    return CopyTiming(
        source=source,
        non_blocking=non_blocking,
        call_s=statistics.median(calls_s),
        total_s=statistics.median(totals_s),
    )


class _RepeatedBatch:
    """Feeds a prefetcher the same host batch `count` times."""

    def __init__(self, batch: torch.Tensor, count: int) -> None:
        self._batch, self._left = batch, count

    def next_batch(self) -> torch.Tensor:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._batch

    def try_next(self) -> tuple[torch.Tensor]:
        return (self.next_batch(),)

    def close(self) -> None:
        """Nothing is under way."""


def _time_steps(device: Device, slot: torch.Tensor, copy_s: float) -> dict[str, float]:
    """Time training steps that compute for about `copy_s` on an accelerator, fed in three ways."""
    matrix = torch.zeros(1024, 1024, device=device.torch_device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def seconds(run: Callable[[], Any]) -> float:
        device.record_event().synchronize()
        began = time.perf_counter()
        run()
        device.record_event().synchronize()
        return time.perf_counter() - began

    multiply(10)
    times = max(1, round(copy_s / (seconds(lambda: multiply(50)) / 50)))

    def direct() -> None:
        for _ in range(_STEPS):
            target = device.empty(TensorSpec.of(slot))
            device.wait_event(device.upload([(target, slot)], device.record_event()))
            multiply(times)

    def ahead() -> None:
        batches = Prefetcher(_RepeatedBatch(slot, _STEPS), device, budget_nbytes=1 << 40, counters=Counters())
        for _ in range(_STEPS):
            batches.next_batch()
            multiply(times)
        batches.close()

    variants = {"alone": lambda: multiply(times * _STEPS), "direct": direct, "ahead": ahead}
    step_s: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(_STEP_ROUNDS):  # interleaved, so that a change of the machine's speed affects all of them
        for name, run in variants.items():
            step_s[name].append(seconds(run) / _STEPS)
    return {name: statistics.median(values) for name, values in step_s.items()}
