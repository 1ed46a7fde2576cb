"""Lines that are cheap now and then, and dear in every step: known by their text and the library function they call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.doctor.causes.cause import required
from penstock.observe.doctor.causes.evidence import describe_line
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import Trial
from penstock.observe.record.finding import Finding


@dataclass(frozen=True, slots=True)
class StepPattern:
    """What is cheap now and then, and dear in every step."""

    name: str
    """Of the finding."""

    pattern: re.Pattern[str]
    """Of the line's text and the library function that it calls."""

    cause: str
    """What the finding states."""

    remedy: str
    """What to change."""

    needs: tuple[str, ...] = ("as_is",)
    """The fields of `Measurements` that it needs."""

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if such lines take a good part of the time of most steps."""
        lines = [line for line in measured.step_lines if self.pattern.search(f"{line.line} {line.calls}")]
        often = [line for line in lines if is_often(line)]
        if sum(line.fraction for line in often) < THRESHOLDS.wasted_step_fraction:
            return None
        return costs_every_step(self.name, often, required(measured.as_is), self.cause, self.remedy)


SAVES = re.compile(
    r" torch\.(serialization|distributed\.checkpoint)\.|\btorch\.save\("
    r"|\bsave_(file|pretrained|checkpoint|state)\("
    r"|\b(pickle|json)\.dump\(|\bnp\.save\w*\(|\.savefig\(|\.to_(csv|parquet|pickle)\("
    # a call into C that takes long may be seen at the line after it
    r"|\bos\.(replace|rename|fsync)\(|\bshutil\.(copy|move)\w*\("
)

STEP_PATTERNS = (
    StepPattern(
        "saves-every-step",
        SAVES,
        "Every step, or every few of them, writes a file.",
        "save once per epoch or every few hundred steps, or in the background: torch.distributed.checkpoint.async_save",
    ),
    StepPattern(
        "collects-garbage-every-step",
        re.compile(r"\bgc\.collect\(|\bempty_cache\("),
        "Every step collects garbage, or empties the allocator's cache, which is filled again.",
        "take it out: Python collects by itself, and the allocator gives back memory before it fails",
    ),
    StepPattern(
        "copied-every-step",
        re.compile(r" copy\.|\bdeepcopy\("),
        "Every step makes a deep copy, such as one of the model's state.",
        "copy only a state that is to be kept: the best one so far, after a validation, or one per epoch; an average "
        "of the weights is updated in place: torch.optim.swa_utils.AveragedModel, torch._foreach_lerp_",
    ),
    StepPattern(
        "appended-every-step",
        re.compile(r"\b([\w.]+) = (torch|np)\.(append|cat|concat|concatenate|vstack|hstack|stack)\(.*\b\1\b"),
        "Every step copies all that was kept of the steps before, to append to it: each step takes longer.",
        "append to a list, and make one tensor of it at the end of the epoch: torch.cat(kept)",
    ),
    StepPattern(
        "measures-every-step",
        re.compile(r" (sklearn|scipy(?!\.optimize)|torchmetrics|skimage)\."),
        "Every step computes a metric, or a statistic, on the processor.",
        "keep what it needs as tensors, and compute it every hundred steps, or once at the end of an epoch",
    ),
    StepPattern(
        "waits-for-another-loader",
        re.compile(r" torch\.utils\.data\.(dataloader|_utils\.(fetch|pin_memory|worker))"),
        "Every step takes a batch of another loader, and waits for it.",
        "make its iterator once, before the loop; give it workers of its own; and examine it alone, by a function that "
        "returns it",
    ),
    StepPattern(
        "another-process-every-step",
        re.compile(r" multiprocessing\.managers\."),
        "Every step asks another process (a multiprocessing.Manager), and waits for its answers.",
        "keep in shared tensors what workers look up (torch.zeros(n).share_memory_()), and write all values of a batch "
        "at once: values[indices] = losses",
    ),
    StepPattern(
        "schedules-every-step",
        # torch's schedules wrap optimizer.step(), too; and a diffusion's scheduler returns what its step has made
        re.compile(r"[:;] [\w.\[\]]*sched\w*\.step\(", re.IGNORECASE),
        "The learning rate's schedule takes a large part of every step.",
        "compute all its factors once, before the loop: factors = [f(step) for step in range(steps)], and "
        "LambdaLR(optimizer, factors.__getitem__); or make its step once per epoch",
    ),
    StepPattern(
        "logs-every-step",
        re.compile(
            r" (logging|matplotlib|tensorboard|wandb|mlflow)\.|\bprint\(|\blog(ger|ging)?\.\w+\("
            r"|\.add_(scalar|image|histogram)\w*\(|\b(wandb|mlflow)\.log"
        ),
        "Every step logs or draws.",
        "log every hundred steps",
    ),
)


def costs_every_step(name: str, lines: Sequence[HotLine], now: Trial, cause: str, remedy: str) -> Finding | None:
    """Return the finding that lines cost what the loop would gain without them; None if that is little."""
    fraction, turns = sum(line.fraction for line in lines), max(line.turns_fraction for line in lines)
    of_loop = fraction * (1 - (now.wait_fraction or 0.0))
    if 1 / (1 - of_loop) < THRESHOLDS.worthwhile_gain:
        return None
    shown = "; ".join(map(describe_line, lines))
    return Finding(
        name=name,
        cause=cause,
        evidence=f"{fraction:.0%} of the step's time, in {turns:.0%} of the steps: {shown}",
        remedy=remedy,
        gain=1 / (1 - of_loop) if of_loop < THRESHOLDS.estimated_fraction else None,
    )


def is_often(line: HotLine) -> bool:
    """Return whether a line is part of most steps, and not of a few that it makes long.

    Steps are looked at every few milliseconds: of those that take less, a line is seen in as many as it takes time.
    """
    return line.turns_fraction >= min(THRESHOLDS.line_turns, THRESHOLDS.short_step_turns * line.fraction)
