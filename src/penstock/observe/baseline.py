"""The comparison with torch's own DataLoader: the same stretch of the same program, run both ways, and what follows.

A stretch is a number of batches after a warm-up, in the order in which the program asked for them, whatever loader
they came from. Its time goes from the end of the warm-up to the last batch, so that whatever the program does between
batches, starting workers for another epoch included, is in it on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.lines import rate

_WAITS = 0.05
"""A loop that waits for less than this share of its time has nothing to gain from a faster loader."""

_BLOCKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """One way to run it."""

    batches: int
    """In the stretch."""

    seconds: float
    """That they took, by the clock."""

    loading_s: float
    """Of those, the seconds in which the program was asking for a batch, or for an iterator."""

    samples: int | None = None
    """In those batches, where the loaders' batch sizes tell."""

    batch_quartiles_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds from batch to batch: a quarter were faster, half, three quarters."""

    block_quartiles_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The same of the means of eighths of the stretch: how far the mean can be trusted."""

    @classmethod
    def of(cls, laps_s: Sequence[float], loading_s: Sequence[float], samples: int | None) -> Stretch:
        """Return the stretch of the given batches.

        Args:
            laps_s: for each batch, the seconds since the one before.
            loading_s: for each batch, those of them in which the program waited for it.
            samples: in all of them.
        """
        size = max(1, len(laps_s) // _BLOCKS)
        blocks = [statistics.fmean(laps_s[start : start + size]) for start in range(0, len(laps_s) - size + 1, size)]
        return cls(
            batches=len(laps_s),
            seconds=sum(laps_s),
            loading_s=sum(loading_s),
            samples=samples,
            batch_quartiles_s=_quartiles(laps_s),
            block_quartiles_s=_quartiles(blocks),
        )

    @property
    def batch_s(self) -> float:
        """Seconds per batch."""
        return self.seconds / self.batches if self.batches else 0.0

    @property
    def waited_share(self) -> float:
        """Share of the time in which the program waited for data."""
        return self.loading_s / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What was compared."""

    warm_up: int
    """Batches before the stretch, which count for nothing."""

    torch: Stretch | None = None
    """With torch's own loader; None where that could not be measured."""

    penstock: Stretch | None = None
    """With penstock's; None where the program ended too soon."""

    problem: str = ""
    """Why there is no comparison, in words."""

    @property
    def gain(self) -> float | None:
        """How many times as fast the program was with penstock's loader; None without a comparison."""
        if self.torch is None or self.penstock is None or not self.penstock.batch_s:
            return None
        return self.torch.batch_s / self.penstock.batch_s

    @property
    def is_clear(self) -> bool:
        """Whether the two differ by more than each of them varies: the middle halves of their eighths do not meet."""
        if self.torch is None or self.penstock is None:
            return False
        (theirs_low, _, theirs_high), (ours_low, _, ours_high) = (
            self.torch.block_quartiles_s,
            self.penstock.block_quartiles_s,
        )
        return ours_high < theirs_low or theirs_high < ours_low

    def verdict(self) -> str:
        """Return what follows, in one sentence."""
        gain = self.gain
        if gain is None or self.torch is None:
            return f"no comparison: {self.problem or 'nothing was measured'}"
        waited = f"it waited for torch's loader {self.torch.waited_share:.1%} of the time"
        if self.torch.waited_share < _WAITS and not (self.is_clear and gain < 1 - _WAITS):
            return f"no gain: your loop is compute-bound; {waited}"
        if not self.is_clear or abs(gain - 1) < 0.02:
            return f"no gain that can be told from the spread of the measurement; {waited}"
        if gain < 1:
            return f"slower: {gain:.2f} times the speed with torch's loader; {waited}"
        return f"{gain:.2f} times the speed with torch's loader; {waited}"

    def render(self) -> str:
        """Return some lines of text."""
        lines = [f"  beside torch's own loader: {self.verdict()}"]
        for name, stretch in (("torch", self.torch), ("penstock", self.penstock)):
            if stretch is not None:
                low, middle, high = (1000 * value for value in stretch.batch_quartiles_s)
                speed = f"{rate(stretch.samples / stretch.seconds)}, " if stretch.samples and stretch.seconds else ""
                lines.append(
                    f"    {name:<9} {speed}{1000 * stretch.batch_s:.2f} ms per batch (median {middle:.2f}, "
                    f"half of them {low:.2f} to {high:.2f}), waited {stretch.waited_share:.1%}"
                )
        if self.torch is not None and self.penstock is not None:
            lines.append(f"    batches {self.warm_up + 1} to {self.warm_up + self.torch.batches} of each")
        return "\n".join(lines)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
