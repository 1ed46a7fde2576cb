"""What copying a batch costs, and whether `pin_memory`, `non_blocking` and `device=` pay. Data in, text out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.core.units import size_text

_WORTHWHILE = 1.1
"""Below this ratio of two copy times a difference is not worth a change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTiming:
    """One way to copy the batch: medians over some rounds, in seconds."""

    source: str
    """Where the batch lies: "slot", "pageable memory" ... For a copy within host memory: where it goes."""

    non_blocking: bool
    """Whether the call returns before the copy is complete."""

    call_s: float
    """How long the call took."""

    total_s: float
    """Until the copy was complete."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """The measurements for a batch of `nbytes` bytes."""

    device: str
    nbytes: int
    host_copies: list[CopyTiming]
    """Copies within host memory: the least that collating a batch costs."""

    device_copies: list[CopyTiming] = field(default_factory=list)
    """Copies to the device; empty if there is none."""

    step_s: dict[str, float] = field(default_factory=dict)
    """Seconds per training step that computes as long as the copy takes: the step "alone", with the copy "direct" in
    front of it, and with the copy "ahead" (`device=`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the measurements and the advice."""
        return {**asdict(self), "advice": self.advice()}

    def advice(self) -> list[str]:
        """Return what pays on this machine and why, one sentence each."""
        return [*_host_advice(self), *(_device_advice(self) if self.device_copies else [_no_device_advice()])]

    def render(self) -> str:
        """Return the report as text."""
        lines = [f"a batch of {size_text(self.nbytes)}", "  within host memory"]
        lines += [f"    {_line(copy, self.nbytes)}" for copy in self.host_copies]
        if self.device_copies:
            lines.append(f"  to {self.device}")
            lines += [f"    {_line(copy, self.nbytes)}" for copy in self.device_copies]
        if self.step_s:
            lines.append("  a step that computes as long as the copy takes")
            lines += [f"    {name:<42}{seconds * 1e3:>9.2f} ms" for name, seconds in self.step_s.items()]
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.advice())]) + "\n"


def _line(copy: CopyTiming, nbytes: int) -> str:
    mode = "non_blocking" if copy.non_blocking else "blocking"
    call = f", the call takes {copy.call_s * 1e3:.2f} ms" if copy.non_blocking else ""
    return f"{copy.source:<28}{mode:<14}{copy.total_s * 1e3:>9.2f} ms {nbytes / copy.total_s / 1e9:>7.1f} GB/s{call}"


def _host_advice(report: TransferReport) -> list[str]:
    fresh, slot = (copy.total_s for copy in report.host_copies)
    if fresh < slot * _WORTHWHILE:
        return []
    return [f"Reused slots pay: a copy into a slot takes {slot / fresh:.2f} of the time of a copy into fresh memory."]


def _no_device_advice() -> str:
    return (
        "There is no accelerator, or the batch stays on the host: only host copies were measured, and pin_memory, "
        "non_blocking and device= have nothing to gain."
    )


def _device_advice(report: TransferReport) -> list[str]:
    return [*_pinning_advice(report), _non_blocking_advice(report), *_prefetch_advice(report)]


def _pinning_advice(report: TransferReport) -> list[str]:
    pageable, slot = _copy(report, "pageable memory"), report.device_copies[-2]
    gain = pageable.total_s / slot.total_s
    sentences = [
        f"pin_memory=True {_pays(gain >= _WORTHWHILE)}: a copy from a pinned slot is {gain:.1f} times as fast as from "
        "pageable memory."
    ]
    if any(copy.source == "pinned on the way" for copy in report.device_copies):
        on_the_way = _copy(report, "pinned on the way")
        is_slower = on_the_way.total_s > pageable.total_s
        sentences.append(
            f"Pinning in the loop (`batch.pin_memory().to(...)`) "
            f"{'costs more than it gains' if is_slower else 'gains'}: {on_the_way.total_s * 1e3:.2f} ms against "
            f"{pageable.total_s * 1e3:.2f} ms for a plain copy."
        )
    return sentences


def _non_blocking_advice(report: TransferReport) -> str:
    from_slot, from_pageable = (
        max(0.0, 1 - copy.call_s / copy.total_s)
        for copy in (report.device_copies[-1], _copy(report, "pageable memory", non_blocking=True))
    )
    return (
        f"non_blocking=True {_pays(from_slot >= 0.5)}: from a pinned slot the caller gets {from_slot:.0%} of the "
        f"copy's time back; from pageable memory {from_pageable:.0%}."
    )


def _prefetch_advice(report: TransferReport) -> list[str]:
    if not report.step_s:
        return []
    direct, ahead, alone = (report.step_s[name] for name in ("direct", "ahead", "alone"))
    return [
        f"device= {_pays(direct / ahead >= 1.02)}: a step as long as the copy takes "
        f"{ahead * 1e3:.2f} ms with the copy ahead of it, {direct * 1e3:.2f} ms with the copy in front of it, "
        f"{alone * 1e3:.2f} ms alone."
    ]


def _copy(report: TransferReport, source: str, *, non_blocking: bool = False) -> CopyTiming:
    return next(copy for copy in report.device_copies if (copy.source, copy.non_blocking) == (source, non_blocking))


def _pays(yes: bool) -> str:
    return "pays" if yes else "does not pay"
