"""Causes that lie in the step: what it waits for, and library functions that are dear in every step."""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import dataclass

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import describe_line
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.step_results import StepCall
from penstock.observe.doctor.trial import FREE, Trial
from penstock.observe.record.finding import Finding

_MANY_READS = 16
"""Values read in a step: on a processor fewer take microseconds; more are worth a change there, too."""
_GROWTH_WINDOWS = 4
"""Windows: in fewer, steps seem to grow by chance."""
_GROWTH_HALF_WAY = 0.1
"""Of the growth: steps that grow have grown, half-way: a jump is another program that began."""
_GROWTH_PAIRS = 0.9
"""Of the pairs of windows: of 5 windows in any order, one in 24 has so many."""
_LINE_TURNS = 0.5
"""Of the steps: a line that is seen in fewer is not what every step does."""

_SHOWN_CALLS = 3


@dataclass(frozen=True, slots=True)
class StepPattern:
    """Functions of libraries that are cheap now and then, and dear in every step."""

    name: str
    """Of the finding."""

    pattern: re.Pattern[str]
    """Of the library function that a line was seen to call, with its module."""

    cause: str
    """What the finding states."""

    remedy: str
    """What to change."""

    needs: tuple[str, ...] = ("as_is",)
    """The fields of `Measurements` that it needs."""

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if such lines take a good part of the time of most steps."""
        lines = [line for line in measured.step_lines if self.pattern.match(line.calls) and _is_often(line)]
        fraction = sum(line.fraction for line in lines)
        of_loop = fraction * (1 - (required(measured.as_is).wait_fraction or 0.0))
        if fraction < thresholds.WASTED_FRACTION or 1 / (1 - of_loop) < thresholds.WORTHWHILE_GAIN:
            return None
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=f"{fraction:.0%} of the step's time, in {max(line.turns_fraction for line in lines):.0%} of the "
            f"steps: {'; '.join(map(describe_line, lines))}",
            remedy=self.remedy,
            gain=1 / (1 - of_loop) if of_loop < thresholds.ESTIMATED_FRACTION else None,
        )


STEP_PATTERNS = (
    StepPattern(
        "saves-every-step",
        re.compile(r"(torch\.(serialization|distributed\.checkpoint)|safetensors|shutil)\b"),
        "Every step, or every few of them, writes a file.",
        "save once per epoch or every few hundred steps, or in the background: torch.distributed.checkpoint.async_save",
    ),
    StepPattern(
        "copied-every-step",
        re.compile(r"copy\b"),
        "Every step makes a deep copy, such as one of the model's state.",
        "copy only a state that is to be kept: the best one so far, after a validation, or one per epoch; an average "
        "of the weights is updated in place: torch.optim.swa_utils.AveragedModel, torch._foreach_lerp_",
    ),
    StepPattern(
        "measures-every-step",
        re.compile(r"(sklearn|scipy(?!\.optimize)|torchmetrics|skimage)\b"),
        "Every step computes a metric, or a statistic, on the processor.",
        "keep what it needs as tensors, and compute it every hundred steps, or once at the end of an epoch",
    ),
    StepPattern(
        "waits-for-another-loader",
        re.compile(r"torch\.utils\.data\.(dataloader|_utils\.(fetch|pin_memory|worker))\b"),
        "Every step takes a batch of another loader, and waits for it.",
        "make its iterator once, before the loop (others = iter(loader), then next(others) in each step); give it "
        "workers of its own; and examine it alone, by a function that returns it",
    ),
    StepPattern(
        "another-process-every-step",
        re.compile(r"multiprocessing\.managers\b"),
        "Every step asks another process (a multiprocessing.Manager), and waits for its answers.",
        "keep in shared tensors what workers look up (torch.zeros(n).share_memory_()), and write all values of a batch "
        "at once: values[indices] = losses",
    ),
    StepPattern(
        "logs-every-step",
        re.compile(r"(logging|matplotlib|tensorboard|torch\.utils\.tensorboard|wandb|mlflow)\b"),
        "Every step logs or draws.",
        "log every hundred steps",
    ),
)


def _is_often(line: HotLine) -> bool:
    """Return whether a line is part of most steps, and not of a few that it makes long.

    Steps are looked at every few milliseconds: of those that take less, a line is seen in as many as it takes time.
    """
    return line.turns_fraction >= min(_LINE_TURNS, line.fraction * thresholds.MOST_FRACTION)


@cause("sync-every-step", "step_calls")
def sync_every_step(measured: Measurements) -> Finding | None:
    """Every step reads a tensor's value, which waits for the device."""
    step = required(measured.step_calls)
    if not step.synchronizing:
        return None
    is_rare = sum(call.per_step for call in step.synchronizing) < _MANY_READS
    return Finding(
        name="sync-every-step",
        cause="Every step reads a value back from its device, and an accelerator is idle meanwhile.",
        evidence=f"in each of {step.steps} steps: {_describe_calls(step.synchronizing)}",
        remedy=(
            "keep the value as a tensor (`total += loss.detach()`), and read it every hundred steps, or once at the "
            "end of an epoch"
        ),
        is_for_accelerators=is_rare and not measured.machine.accelerator,
    )


@cause("non-blocking-from-pageable", "step_calls")
def non_blocking_from_pageable(measured: Measurements) -> Finding | None:
    """`non_blocking=True` from memory that is not pinned."""
    step = required(measured.step_calls)
    if not step.pageable_copies or measured.settings.pin_memory:
        return None
    return Finding(
        name="non-blocking-from-pageable",
        cause="non_blocking=True from memory that is not pinned: the copy to an accelerator does not overlap.",
        evidence=f"pin_memory=False; in every step: {_describe_calls(step.pageable_copies)}",
        remedy="pin_memory=True in the DataLoader; or penstock.DataLoader(..., device=...), which copies ahead",
        is_for_accelerators=not measured.machine.accelerator,
    )


@cause("pinned-without-accelerator")
def pinned_without_accelerator(measured: Measurements) -> Finding | None:
    """`pin_memory=True` without an accelerator."""
    if not measured.settings.pin_memory or measured.machine.accelerator:
        return None
    return Finding(
        name="pinned-without-accelerator",
        cause="pin_memory=True, and there is no accelerator to copy to.",
        evidence="torch.accelerator.is_available() is False",
        remedy="pin_memory=torch.accelerator.is_available()",
    )


@cause("steps-grow", "as_is")
def steps_grow(measured: Measurements) -> Finding | None:
    """Each step takes longer than the one before, whatever feeds it."""
    trials = [one for one in (measured.as_is, measured.trial(FREE)) if one is not None]
    if not measured.has_step or min(map(_growth, trials)) < thresholds.STEP_SLOWDOWN:
        return None
    first, *_, last = required(measured.as_is).windows
    longest = "".join(f"; most of it passes in {describe_line(line)}" for line in measured.step_lines[:1])
    return Finding(
        name="steps-grow",
        cause="Steps take longer and longer: something that every step handles grows.",
        evidence=(
            f"{first.step_s / first.batches * 1e3:.1f} ms in the first round of the trials, "
            f"{last.step_s / last.batches * 1e3:.1f} ms in the last{longest}"
        ),
        remedy="keep a sum and a count instead of all that was seen, or compute with all of it once per epoch",
        is_uncertain=measured.machine.is_busy,
    )


def _growth(trial: Trial) -> float:
    """Return how many times as long the last steps of a trial took as its first ones; 1 unless they grew steadily."""
    steps_s = [one.step_s / one.batches for one in trial.windows]
    pairs = [before < after for before, after in itertools.combinations(steps_s, 2)]
    if len(steps_s) < _GROWTH_WINDOWS or sum(pairs) < _GROWTH_PAIRS * len(pairs):
        return 1.0
    grown_half_way = (statistics.median(steps_s) - steps_s[0]) / max(1e-9, steps_s[-1] - steps_s[0])
    if not _GROWTH_HALF_WAY < grown_half_way < 1 - _GROWTH_HALF_WAY:
        return 1.0
    return steps_s[-1] / max(1e-9, steps_s[0])


@cause("debugging-every-step", "step_calls")
def debugging_every_step(measured: Measurements) -> Finding | None:
    """Anomaly detection, a profiler or a tracer is on.

    Source: PyTorch's performance tuning guide, "Disable debugging APIs".
    """
    modes = required(measured.step_calls).debugged_by
    if not modes:
        return None
    return Finding(
        name="debugging-every-step",
        cause="Something that is made for debugging is on, and slows down every operation of every step.",
        evidence=f"in the observed steps: {'; '.join(modes)}",
        remedy="turn it off, or on for a few steps only",
    )


def _describe_calls(calls: tuple[StepCall, ...]) -> str:
    shown = "; ".join(f"{call.what} in {call.line} ({call.per_step:g} per step)" for call in calls[:_SHOWN_CALLS])
    return shown + (f"; and {len(calls) - _SHOWN_CALLS} more" if len(calls) > _SHOWN_CALLS else "")
