"""The comparison with torch's own DataLoader: the same batches of the same program, timed with either loader.

A timing window is a number of batches after a warm-up, in the order in which the program asked for them, from whatever
loader. It lasts from the end of the warm-up to the last batch, so that everything the program does between batches,
such as starting workers for another epoch, counts on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.record.formatting import percent_text, rate_text
from penstock.observe.record.rates import HIDDEN

_MIN_GAIN = 0.02
"""Smaller relative differences are not reported as a gain."""

_MOSTLY = 0.5
"""Of the difference between two runs."""

_BLOCKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingWindow:
    """The timing of a window of batches with one loader."""

    batches: int
    """Batches in the window."""

    seconds: float
    """Wall-clock time of the window."""

    loading_s: float
    """Of those, the seconds in which the program waited for a batch or for an iterator."""

    samples: int | None = None
    """Samples in those batches; None where a loader's batch size is unknown."""

    batch_quartiles_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Quartiles of the seconds from batch to batch."""

    block_quartiles_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Quartiles of the means of eighths of the window: how far the mean can be trusted."""

    @classmethod
    def of(
        cls, batch_intervals_s: Sequence[float], batch_loading_s: Sequence[float], samples: int | None
    ) -> TimingWindow:
        """Return the timing window of the given batches.

        Args:
            batch_intervals_s: for each batch, the seconds since the one before.
            batch_loading_s: for each batch, those of them in which the program waited for it.
            samples: in all of them.
        """
        size = max(1, len(batch_intervals_s) // _BLOCKS)
        starts = range(0, len(batch_intervals_s) - size + 1, size)
        blocks = [statistics.fmean(batch_intervals_s[start : start + size]) for start in starts]
        return cls(
            batches=len(batch_intervals_s),
            seconds=sum(batch_intervals_s),
            loading_s=sum(batch_loading_s),
            samples=samples,
            batch_quartiles_s=_quartiles(batch_intervals_s),
            block_quartiles_s=_quartiles(blocks),
        )

    @property
    def batch_s(self) -> float:
        """Seconds per batch."""
        return self.seconds / self.batches if self.batches else 0.0

    @property
    def stall_fraction(self) -> float:
        """Fraction of the time in which the program waited for data."""
        return self.loading_s / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """Seconds per batch of the program's own step."""
        return self.batch_s * (1 - self.stall_fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A program's timing with torch's loader and with penstock's."""

    warmup_batches: int
    """Batches before the window, which are not counted."""

    torch: TimingWindow | None = None
    """With torch's own loader; None where it could not be measured."""

    penstock: TimingWindow | None = None
    """With penstock's loader; None where the program ended too early."""

    left_alone: int = 0
    """Batches of `penstock` that came from loaders which were not replaced."""

    problem: str = ""
    """Why there is no comparison; empty if there is one."""

    @property
    def speedup(self) -> float | None:
        """Speed with penstock's loader divided by the speed with torch's; None without a comparison."""
        if self.torch is None or self.penstock is None or not self.penstock.batch_s:
            return None
        return self.torch.batch_s / self.penstock.batch_s

    @property
    def is_clear(self) -> bool:
        """Whether the difference exceeds the spread: the interquartile ranges of the eighths do not overlap."""
        if self.torch is None or self.penstock is None:
            return False
        torch_low, _, torch_high = self.torch.block_quartiles_s
        penstock_low, _, penstock_high = self.penstock.block_quartiles_s
        return penstock_high < torch_low or torch_high < penstock_low

    def verdict(self) -> str:
        """Return the result in one sentence."""
        speedup = self.speedup
        if speedup is None or self.torch is None:
            return f"no comparison: {self.problem or 'nothing was measured'}"
        waited = f"it waited for torch's loader {percent_text(self.torch.stall_fraction)} of the time"
        if self.torch.stall_fraction < HIDDEN and not (self.is_clear and speedup < 1 - HIDDEN):
            return f"no gain: your loop is compute-bound; {waited}"
        if not self.is_clear or abs(speedup - 1) < _MIN_GAIN:
            return f"no gain beyond the spread of the measurement; {waited}"
        if speedup < 1:
            return f"slower: {speedup:.2f} times the speed with torch's loader{self._slower_step()}; {waited}"
        return f"{speedup:.2f} times the speed with torch's loader; {waited}"

    def _slower_step(self) -> str:
        """Return that the step took longer, where that is most of the difference."""
        assert self.torch is not None
        assert self.penstock is not None
        torch_s, penstock_s = self.torch.step_s, self.penstock.step_s
        if penstock_s - torch_s < _MOSTLY * (self.penstock.batch_s - self.torch.batch_s):
            return ""
        steps = f"{1000 * penstock_s:.2f} ms per batch, and {1000 * torch_s:.2f} ms with torch's"
        return f", by the program's own step ({steps}), which other programs slow down as well"

    def render(self) -> str:
        """Return the comparison as lines of text."""
        lines = [f"  compared with torch's own loader: {self.verdict()}"]
        for name, window in (("torch", self.torch), ("penstock", self.penstock)):
            if window is not None:
                lines.append(f"    {name:<9} {_window_text(window)}")
        if self.torch is not None and self.penstock is not None:
            first = self.warmup_batches + 1
            lines.append(f"    batches {first} to {first + self.torch.batches - 1} of each")
            if self.left_alone:
                lines.append(f"    {self.left_alone} of penstock's batches came from loaders that were not replaced")
        return "\n".join(lines)


def _window_text(window: TimingWindow) -> str:
    low, median, high = (1000 * value for value in window.batch_quartiles_s)
    rate = f"{rate_text(window.samples / window.seconds)}, " if window.samples and window.seconds else ""
    return (
        f"{rate}{1000 * window.batch_s:.2f} ms per batch (median {median:.2f}, half of them {low:.2f} to {high:.2f}), "
        f"waited {percent_text(window.stall_fraction)}"
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
