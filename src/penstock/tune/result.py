"""What a search found: data, and the same in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.units import size_text
from penstock.tune.setting import Setting
from penstock.tune.trial import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a search found."""

    choice: Setting
    """The setting to use."""

    trials: tuple[Trial, ...]
    """What was tried, in the order in which it was first tried."""

    left_out: tuple[tuple[Setting, int], ...] = ()
    """What takes more memory than allowed, and how much: predicted, and so not tried, or else seen, and stopped."""

    ram_nbytes: int
    """The memory that was allowed."""

    why: str
    """Why the search stopped."""

    doubt: str = ""
    """What could not be told, and why; empty when the choice is clear."""

    gil: str = ""
    """Whether the dataset releases the GIL, in words; empty where that was not looked at."""

    device: str = ""
    """What was looked at of moving batches to an accelerator, in words."""

    seconds: float = 0.0
    """How long it took."""

    @property
    def chosen(self) -> Trial:
        """The choice's trial."""
        return next(trial for trial in self.trials if trial.setting == self.choice)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; `from_json` reads it."""
        return asdict(self) | {"line": self.choice.line()}

    @classmethod
    def from_json(cls, data: Any) -> Tuned:
        """Return what `to_json` made `data` from.

        Raises:
            KeyError, TypeError, ValueError: it is broken.
        """
        trials = tuple(
            Trial(**{**trial, "setting": Setting(**trial["setting"]), "batch_ms": tuple(trial["batch_ms"])})
            for trial in data["trials"]
        )
        known = {name: data[name] for name in ("ram_nbytes", "why", "doubt", "gil", "device", "seconds")}
        found = cls(
            choice=Setting(**data["choice"]),
            trials=trials,
            left_out=tuple((Setting(**setting), nbytes) for setting, nbytes in data["left_out"]),
            **known,
        )
        if all(trial.setting != found.choice for trial in trials):
            raise ValueError("the choice was not tried")
        return found

    def render(self) -> str:
        """Return it as lines of text: what was tried, why no more, what to paste."""
        lines = [f"  {'':<30}{'samples/s':>10}  {'±':>4}  {'waits':>5}  {'batch, ms (quartiles)':>22}  {'memory':>10}"]
        for trial in self.trials:
            low, middle, high = trial.batch_ms
            mark = ">" if trial.setting == self.choice else " "
            spread = f"{middle:.1f} ({low:.1f} … {high:.1f})"
            lines.append(
                f"{mark} {trial.setting.words():<30}{trial.samples_per_s:>10.0f}  {trial.error:>4.0%}  "
                f"{trial.stall_share:>5.0%}  {spread:>22}  {size_text(trial.ram_nbytes):>10}"
            )
        for setting, nbytes in self.left_out:
            lines.append(
                f"  {setting.words():<30}{'':>10}  takes {size_text(nbytes)}, over {size_text(self.ram_nbytes)}"
            )
        lines.append(f"Stopped after {self.seconds:.1f} s: {self.why}.")
        lines += [f"{words[0].upper()}{words[1:]}." for words in (self.gil, self.device) if words]
        lines += [f"Not sure: {self.doubt}."] if self.doubt else []
        lines.append(f"\n{self.choice.line()}")
        return "\n".join(lines) + "\n"
