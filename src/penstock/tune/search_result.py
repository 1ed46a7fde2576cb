"""The result of a search: data, and the same as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.units import size_text
from penstock.tune.setting import Setting
from penstock.tune.trial_result import SettingTrial


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """The result of a search."""

    choice: Setting
    """The setting to use."""

    trials: tuple[SettingTrial, ...]
    """All trials, in the order in which their settings were first tried."""

    left_out: tuple[tuple[Setting, int], ...] = ()
    """Settings that take more memory than allowed, with the bytes: predicted and not tried, or measured and stopped."""

    ram_nbytes: int
    """The memory that was allowed."""

    why: str
    """Why the search stopped."""

    doubt: str = ""
    """What remained uncertain, and why; empty if the choice is clear."""

    gil: str = ""
    """Whether the dataset releases the GIL, as text; empty if that was not measured."""

    device: str = ""
    """What was tried to move batches to an accelerator, as text."""

    seconds: float = 0.0
    """How long it took."""

    @property
    def choice_trial(self) -> SettingTrial:
        """The choice's trial."""
        return next(trial for trial in self.trials if trial.setting == self.choice)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self) | {"line": self.choice.line()}

    def render(self) -> str:
        """Return it as lines of text: the trials, why the search stopped, and the line to paste."""
        lines = [f"  {'':<30}{'samples/s':>10}  {'±':>4}  {'waits':>5}  {'batch, ms (quartiles)':>22}  {'memory':>10}"]
        for trial in self.trials:
            low, middle, high = trial.batch_ms
            mark = ">" if trial.setting == self.choice else " "
            spread = f"{middle:.1f} ({low:.1f} … {high:.1f})"
            lines.append(
                f"{mark} {trial.setting.describe():<30}{trial.samples_per_s:>10.0f}  {trial.error:>4.0%}  "
                f"{trial.stall_fraction:>5.0%}  {spread:>22}  {size_text(trial.ram_nbytes):>10}"
            )
        for setting, nbytes in self.left_out:
            lines.append(
                f"  {setting.describe():<30}{'':>10}  takes {size_text(nbytes)}, over {size_text(self.ram_nbytes)}"
            )
        lines.append(f"Stopped after {self.seconds:.1f} s: {self.why}.")
        lines += [f"{text[0].upper()}{text[1:]}." for text in (self.gil, self.device) if text]
        lines += [f"Not sure: {self.doubt}."] if self.doubt else []
        lines.append(f"\n{self.choice.line()}")
        return "\n".join(lines) + "\n"
