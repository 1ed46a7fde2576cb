"""What moving a batch costs on this machine, and so which of `pin_memory`, `non_blocking` and `device=` pays here.

Everything is measured, with a batch of the shape that was asked for; the words follow from the figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.core.units import size_text
from penstock.device import Device, Mould
from penstock.feed.counters import Counters
from penstock.feed.prefetch import Prefetcher
from penstock.feed.transport.slab import PrivateSlab

_ROUNDS = 15
_STEPS = 12
_WORTH = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One way of moving the batch: medians over some rounds, in seconds."""

    source: str
    """Where the batch lies (or goes, within the host): "slot", "pageable memory" ..."""

    non_blocking: bool
    """Whether the call returns before the batch has arrived."""

    call_s: float
    """How long the caller was held up."""

    total_s: float
    """Until the batch had arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What was measured, for a batch of `nbytes` bytes."""

    device: str
    nbytes: int
    host: list[Move]
    """Copies within host memory: what collating a batch takes at least."""

    moves: list[Move] = field(default_factory=list)
    """Copies to the device; empty when there is none."""

    step_s: dict[str, float] = field(default_factory=dict)
    """Seconds per training step that computes as long as the copy takes: the step "alone", with the copy "direct" in
    front of it, and with the copy "ahead" (`device=`)."""

    def to_json(self) -> dict[str, Any]:
        """Return everything, and the advice."""
        return {**asdict(self), "advice": self.advice()}

    def advice(self) -> list[str]:
        """Return what pays here and why, a sentence each."""
        return [*_host_advice(self), *(_device_advice(self) if self.moves else [_nothing_to_move_to(self)])]

    def render(self) -> str:
        """Return the report as text."""
        lines = [f"a batch of {size_text(self.nbytes)}", "  within host memory"]
        lines += [f"    {_line(move, self.nbytes)}" for move in self.host]
        if self.moves:
            lines.append(f"  to {self.device}")
            lines += [f"    {_line(move, self.nbytes)}" for move in self.moves]
        if self.step_s:
            lines.append("  a step that computes as long as the copy takes")
            lines += [f"    {name:<42}{seconds * 1e3:>9.2f} ms" for name, seconds in self.step_s.items()]
        return "\n".join([*lines, *(f"- {words}" for words in self.advice())]) + "\n"


def measure_transfer(size: tuple[int, ...], dtype: torch.dtype, device: Device) -> TransferReport:
    """Measure the moves of a batch of `size` and `dtype` to `device`; takes some seconds.

    Example:
        >>> from penstock.device import device_of
        >>> report = measure_transfer((8, 256), torch.float32, device_of("cpu"))
        >>> report.nbytes
        8192
    """
    batch = torch.zeros(size, dtype=dtype)
    slab = PrivateSlab(max(4096, batch.nbytes))
    slot = torch.frombuffer(np.frombuffer(slab.memory, np.uint8), dtype=dtype, count=batch.numel()).view(size)
    host = [
        _timed("fresh memory", lambda: batch.clone()),
        _timed("slot", lambda: slot.copy_(batch)),
    ]
    if device.is_host:
        return TransferReport(device=device.name, nbytes=batch.nbytes, host=host)
    registration = device.register(slab.memory)
    try:
        moves = _moves(device, batch, slot, is_pinned=registration is not None)
        steps = _steps(device, slot, moves[-1].total_s) if device.torch_device.type != "cpu" else {}
    finally:
        if registration is not None:
            registration.close()
    return TransferReport(device=device.name, nbytes=batch.nbytes, host=host, moves=moves, step_s=steps)


def _moves(device: Device, batch: torch.Tensor, slot: torch.Tensor, *, is_pinned: bool) -> list[Move]:
    target = device.empty(Mould.of(batch))

    def copy(source: torch.Tensor, *, wait: bool) -> Callable[[], Any]:
        def run() -> Any:
            event = device.upload([(target, source)], device.now())
            if wait:
                event.synchronize()
            return event

        return run

    found = [
        _timed("pageable memory", copy(batch, wait=True)),
        _timed("pageable memory", copy(batch, wait=False), non_blocking=True),
    ]
    if device.torch_device.type != "cpu":
        pinned = batch.pin_memory()
        found += [
            _timed("pinned on the way", lambda: copy(batch.pin_memory(), wait=True)()),
            _timed("memory pinned by torch", copy(pinned, wait=True)),
            _timed("memory pinned by torch", copy(pinned, wait=False), non_blocking=True),
        ]
    name = "slot" if is_pinned else "slot (could not be pinned)"
    found += [_timed(name, copy(slot, wait=True)), _timed(name, copy(slot, wait=False), non_blocking=True)]
    return found


def _timed(source: str, move: Callable[[], Any], *, non_blocking: bool = False) -> Move:
    calls, totals = [], []
    for number in range(_ROUNDS + 2):
        began = time.perf_counter()
        event = move()
        called = time.perf_counter()
        if non_blocking:
            event.synchronize()
        ended = time.perf_counter()
        if number >= 2:
            calls.append(called - began)
            totals.append(ended - began)
    return Move(
        source=source,
        non_blocking=non_blocking,
        call_s=statistics.median(calls),
        total_s=statistics.median(totals),
    )


class _Same:
    """The same host batch, so many times."""

    def __init__(self, batch: torch.Tensor, count: int) -> None:
        self._batch, self._left = batch, count

    def next_batch(self) -> torch.Tensor:
        if not self._left:
            raise StopIteration
        self._left -= 1
        return self._batch

    def try_next(self) -> tuple[torch.Tensor]:
        return (self.next_batch(),)


def _steps(device: Device, slot: torch.Tensor, copy_s: float) -> dict[str, float]:
    """Time training steps of about `copy_s` on an accelerator, fed in three ways."""
    matrix = torch.zeros(1024, 1024, device=device.torch_device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def seconds(run: Callable[[], Any]) -> float:
        device.now().synchronize()
        began = time.perf_counter()
        run()
        device.now().synchronize()
        return time.perf_counter() - began

    multiply(10)
    times = max(1, round(copy_s / (seconds(lambda: multiply(50)) / 50)))

    def direct() -> None:
        for _ in range(_STEPS):
            target = device.empty(Mould.of(slot))
            device.hand_over(device.upload([(target, slot)], device.now()))
            multiply(times)

    def ahead() -> None:
        batches = Prefetcher(_Same(slot, _STEPS), device, budget_nbytes=1 << 40, counters=Counters())
        for _ in range(_STEPS):
            batches.next_batch()
            multiply(times)
        batches.close()

    ways = {"alone": lambda: multiply(times * _STEPS), "direct": direct, "ahead": ahead}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            found[name].append(seconds(way) / _STEPS)
    return {name: statistics.median(values) for name, values in found.items()}


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────


def _line(move: Move, nbytes: int) -> str:
    how = "non_blocking" if move.non_blocking else "blocking"
    held = f", caller held up {move.call_s * 1e3:.2f} ms" if move.non_blocking else ""
    return f"{move.source:<28}{how:<14}{move.total_s * 1e3:>9.2f} ms {nbytes / move.total_s / 1e9:>7.1f} GB/s{held}"


def _host_advice(report: TransferReport) -> list[str]:
    fresh, slot = (move.total_s for move in report.host)
    if fresh < slot * _WORTH:
        return []
    return [f"Reused slots pay: copying a batch into one takes {slot / fresh:.2f} of what fresh memory takes."]


def _nothing_to_move_to(report: TransferReport) -> str:
    return (
        "There is no accelerator here, or the batch stays on the host: only host copies were measured, and pin_memory, "
        "non_blocking and device= have nothing to gain."
    )


def _device_advice(report: TransferReport) -> list[str]:
    by = {(move.source, move.non_blocking): move for move in report.moves}
    pageable, slot = by["pageable memory", False], report.moves[-2]
    started = report.moves[-1]
    gain = pageable.total_s / slot.total_s
    words = [
        f"pin_memory=True {_pays(gain >= _WORTH)}: a copy from a pinned slot is {gain:.1f} times as fast as from "
        "pageable memory."
    ]
    on_the_way = by.get(("pinned on the way", False))
    if on_the_way is not None:
        slower = on_the_way.total_s > pageable.total_s
        words.append(
            f"Pinning in the loop (`batch.pin_memory().to(...)`) {'costs more than it gains' if slower else 'gains'}: "
            f"{on_the_way.total_s * 1e3:.2f} against {pageable.total_s * 1e3:.2f} ms for a plain copy."
        )
    hidden = 1 - started.call_s / started.total_s
    words.append(
        f"non_blocking=True {_pays(hidden >= 0.5)}: from a pinned slot the caller gets "
        f"{hidden:.0%} of the copy's time back; from pageable memory "
        f"{max(0.0, 1 - by['pageable memory', True].call_s / by['pageable memory', True].total_s):.0%}."
    )
    if report.step_s:
        direct, ahead, alone = (report.step_s[name] for name in ("direct", "ahead", "alone"))
        words.append(
            f"device= {_pays(direct / ahead >= 1.02)}: a step as long as the copy takes "
            f"{ahead * 1e3:.2f} ms with the copy ahead of it, {direct * 1e3:.2f} ms with the copy in front of it, "
            f"{alone * 1e3:.2f} ms alone."
        )
    return words


def _pays(yes: bool) -> str:
    return "pays" if yes else "does not pay"
