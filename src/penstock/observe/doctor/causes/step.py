"""Causes that lie in the step: waiting for the device, copies that do not overlap, files written each time."""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import replace

from penstock.observe.doctor.causes.cause import ask, cause, required
from penstock.observe.doctor.causes.evidence import describe_line, describe_trial
from penstock.observe.doctor.causes.step_patterns import SAVES, STEP_PATTERNS, costs_every_step, is_often
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.step_results import CallStatement, StepCall, StepCalls
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import FREE, PINNED, Trial
from penstock.observe.record.finding import Finding

_SHOWN_CALLS = 3


@cause("sync-every-step", "step_calls")
def sync_every_step(measured: Measurements) -> Finding | None:
    """Every step reads a tensor's value, which waits for the device."""
    step = required(measured.step_calls)
    if not step.synchronizing:
        return None
    is_rare = sum(call.per_step for call in step.synchronizing) < THRESHOLDS.many_reads
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
        evidence=f"pin_memory=False{_pinned_text(measured)}; in every step: {_describe_calls(step.pageable_copies)}",
        remedy="pin_memory=True in the DataLoader; or penstock.DataLoader(..., device=...), which copies ahead",
        gain=_pinned_gain(measured),
        is_measured=True,
        is_for_accelerators=not measured.machine.accelerator,
    )


@cause("not-pinned")
def not_pinned(measured: Measurements) -> Finding | None:
    """Copies from memory that is not pinned, which wait, where pinned batches were seen to be faster."""
    gain, step = _pinned_gain(measured), measured.step_calls
    if gain is None or (step is not None and step.pageable_copies):
        return None
    return Finding(
        name="not-pinned",
        cause="Batches are copied to the accelerator from memory that is not pinned, and the loop waits for each copy.",
        evidence=f"pin_memory=False{_pinned_text(measured)}",
        remedy=(
            "pin_memory=True in the DataLoader, and .to(device, non_blocking=True); or penstock.DataLoader(..., "
            "device=...), which copies ahead"
        ),
        gain=gain,
        is_measured=True,
    )


def _pinned_gain(measured: Measurements) -> float | None:
    """Return how much faster the loop was with pinned batches; None where that was not clear, or not tried."""
    gain = measured.gain_of(PINNED)
    return gain.median if gain is not None and gain.pays() else None


def _pinned_text(measured: Measurements) -> str:
    trial = measured.trial(PINNED)
    return f"; {describe_trial(measured, trial)}" if trial is not None and measured.gain_of(PINNED) is not None else ""


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
    if not measured.has_step or min(map(_growth, trials)) < THRESHOLDS.step_slowdown:
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
    if len(steps_s) < THRESHOLDS.growth_windows or sum(pairs) < THRESHOLDS.growth_pairs * len(pairs):
        return 1.0
    grown_half_way = (statistics.median(steps_s) - steps_s[0]) / max(1e-9, steps_s[-1] - steps_s[0])
    if not THRESHOLDS.growth_half_way < grown_half_way < 1 - THRESHOLDS.growth_half_way:
        return 1.0
    return steps_s[-1] / max(1e-9, steps_s[0])


@cause("operations-in-a-loop", "as_is", "step_calls")
def operations_in_a_loop(measured: Measurements) -> Finding | None:
    """A line of the step calls torch hundreds of times, for an element or a pair at a time."""
    now, calls = required(measured.as_is), required(measured.step_calls).operations
    lines = [line for line in measured.step_lines if calls.get(line.line, 0.0) >= THRESHOLDS.many_operations]
    if not lines or sum(line.fraction for line in lines) < THRESHOLDS.wasted_step_fraction:
        return None
    counts = ", ".join(f"{calls[line.line]:.0f} operations of torch's per step" for line in lines[:1])
    found = costs_every_step(
        "operations-in-a-loop",
        lines,
        now,
        "A line calls torch again and again in every step, for a few numbers at a time, in a loop of Python's.",
        "compute it for all of them at once: broadcasting, torch.where, torch.bincount, torch.cdist, a comparison of "
        "torch.arange with lengths",
    )
    return replace(found, evidence=f"{found.evidence} ({counts})", gain=None) if found is not None else None


@cause("costly-step-line", "as_is", "step_calls")
def costly_step_line(measured: Measurements) -> Finding | None:
    """A line takes much of the step, and contributes neither to gradients nor to the optimizer's work."""
    now, calls = required(measured.as_is), required(measured.step_calls)
    if measured.machine.accelerator or not calls.trains or not measured.step_lines:
        return None  # with an accelerator, time passes in the lines that wait for it
    line = _untrained_statement(measured, calls) or _untrained_line(measured.step_lines[0], calls)
    if line is None or not is_often(line):
        return None
    finding = costs_every_step(
        "costly-step-line",
        [line],
        now,
        "One line takes a large part of every step, and the gradients do not depend on it.",
        "do it every hundred steps, or once per epoch; what a batch needs, do in the dataset, beside the step",
    )
    # What grows takes another part of each step: of a whole epoch's nobody knows yet.
    return finding if finding is None or steps_grow.find(measured) is None else replace(finding, gain=None)


def _untrained_line(line: HotLine, calls: StepCalls) -> HotLine | None:
    if (
        line.fraction < THRESHOLDS.untrained_line_fraction
        or line.feeds_loader
        or line.line in (*calls.training_lines, *calls.averaging_lines)
        or _TRAINS.search(f" {line.calls}")
    ):
        return None
    if calls.observed_lines is not None and line.line not in calls.observed_lines:
        return None  # it may compute, without torch, what the loss needs
    return line


def _untrained_statement(measured: Measurements, calls: StepCalls) -> HotLine | None:
    """Return the longest call whose result is dropped, and beneath which nothing is done for training.

    What such a call computes can only reach the loss through objects. Where gradients are made of a batch, of
    parameters and of numbers that are the same in all steps, nothing that it computes reaches them.
    """
    if calls.takes_values or not calls.updates:
        return None
    if any(pattern.find(measured) for pattern in STEP_PATTERNS):  # which know better what it is
        return None
    return next((one.hot for one in measured.step_statements if _is_for_nothing(one, calls)), None)


def _is_for_nothing(one: CallStatement, calls: StepCalls) -> bool:
    """Return whether nothing is trained beneath a statement, and it takes more than what it does may be worth."""
    least = THRESHOLDS.wasted_step_fraction
    if not set(one.lines).isdisjoint(calls.keeping_lines):
        least = THRESHOLDS.untrained_line_fraction
    is_training = not set(one.lines).isdisjoint((*calls.training_lines, *calls.averaging_lines))
    return one.hot.fraction >= least and not is_training and not any(map(_TRAINS_BENEATH.search, one.calls))


@cause("prepared-in-step", "as_is", "step_calls")
def prepared_in_step(measured: Measurements) -> Finding | None:
    """The step computes what is made of the batch alone, such as an augmentation, before its model gets it."""
    now, calls = required(measured.as_is), required(measured.step_calls)
    if measured.machine.accelerator or not (calls.trains and calls.updates):
        return None  # with an accelerator, time passes in the lines that wait for it
    known = {one.line: one for one in calls.preparing}
    lines = [line for line in measured.step_lines if line.line in known and is_often(line)]
    fraction = sum(line.fraction for line in lines)
    if fraction < THRESHOLDS.untrained_line_fraction:
        return None
    found = costs_every_step(
        "prepared-in-step",
        lines,
        now,
        "The step prepares its batch: it computes what no parameter is part of, before its model gets it.",
        "",
    )
    if found is None:
        return None
    of_step = 1 - (now.wait_fraction or 0.0)
    saved = of_step * sum(line.fraction * (1 - known[line.line].left_by_fft) for line in lines)
    cores = sum(line.fraction * known[line.line].cores for line in lines) / fraction
    by_fft, beside = 1 / max(1e-9, 1 - saved), _gain_beside(of_step * fraction, cores, measured)
    remedies, evidence = [], f"{found.evidence}, which keeps {cores:.1f} cores busy"
    longest = max((known[line.line] for line in lines), key=lambda one: one.taps)
    if by_fft >= THRESHOLDS.worthwhile_gain:
        remedies.append(_BY_FFT)
        evidence += f"; a convolution with {longest.taps} taps: an FFT of its sizes leaves {longest.left_by_fft:.0%}"
    is_beside = beside >= THRESHOLDS.worthwhile_gain and not measured.machine.is_busy
    if is_beside or not remedies:
        remedies.append(_BESIDE if is_beside else f"with fewer operations; or, where cores are left for it, {_BESIDE}")
    return replace(
        found,
        evidence=evidence,
        remedy="; or ".join(remedies),
        gain=by_fft if by_fft >= THRESHOLDS.worthwhile_gain and saved < THRESHOLDS.estimated_fraction else None,
        is_uncertain=by_fft < THRESHOLDS.worthwhile_gain and not is_beside,
    )


_BY_FFT = (
    "convolve by FFT: torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(kernel, n), n), with n of at least both "
    "lengths together (conv1d does not flip its kernel, and this does)"
)
_BESIDE = "in the dataset or in collate_fn, whose workers (num_workers=...) do it beside the step"


def _gain_beside(fraction: float, cores: float, measured: Measurements) -> float:
    """Return by how much a loop gains at most if workers do a part of its step, which keeps so many cores busy.

    The cores have to do all of it still, and what workers do already.
    """
    machine, samples, batch_s = measured.machine, measured.samples, required(measured.as_is).batch_s
    of_rest = min(float(machine.intra_op_threads), machine.usable_cores)
    of_workers = samples.batch_s / batch_s if samples and batch_s and measured.settings.num_workers else 0.0
    least = (fraction * cores + (1 - fraction) * of_rest + of_workers) / machine.usable_cores
    return 1 / max(1 - fraction, least)


@cause("computes-outside-torch", "as_is", "step_calls")
def computes_outside_torch(measured: Measurements) -> Finding | None:
    """Much of the step passes in Python, in NumPy or in other libraries, whether gradients depend on it or not."""
    now, calls = required(measured.as_is), required(measured.step_calls)
    if not calls.trains or any(ask(one, measured) for one in (*STEP_PATTERNS, costly_step_line)):
        return None  # they know better what it is
    torch_lines = {*calls.operations, *calls.training_lines, *(calls.observed_lines or ())}
    lines = [
        line
        for line in measured.step_lines
        if line.line not in torch_lines and not line.calls.startswith("torch") and not line.feeds_loader
    ]
    often = [line for line in lines if is_often(line)]
    if sum(line.fraction for line in often) < THRESHOLDS.untrained_line_fraction:
        return None
    return costs_every_step(
        "computes-outside-torch",
        often,
        now,
        "Much of every step is not torch's: Python, NumPy or another library computes meanwhile, on one core.",
        "what is the same each time, compute once; what a batch needs, in a DataLoader's dataset, whose workers do it "
        "beside the step; what is for a report, every hundred steps; what the loss needs, for the whole batch at "
        "once, with torch",
    )


@cause("costly-now-and-then", "as_is")
def costly_now_and_then(measured: Measurements) -> Finding | None:
    """A program without a DataLoader does something in a few of its steps that takes much of its time.

    Epochs over a loader do not end while they are examined; what those do between them has causes of its own.
    """
    if measured.settings.kind:
        return None
    rare = [line for line in measured.step_lines if not is_often(line) and _is_beside_models(line, measured)]
    fraction, turns = sum(line.fraction for line in rare), max((line.turns_fraction for line in rare), default=0.0)
    if fraction < THRESHOLDS.untrained_line_fraction:
        return None
    shown = "; ".join(map(describe_line, rare))
    is_saved = SAVES.search(f"{rare[0].line} {rare[0].calls}") is not None
    return Finding(
        name="costly-now-and-then",
        cause="What the program does in a few of its steps takes a large part of its time.",
        evidence=f"{fraction:.0%} of the time, in {turns:.0%} of the steps: {shown}",
        remedy=(
            "save more rarely, and only state_dict()s: an object is pickled with all that it refers to"
            if is_saved
            else "do it more rarely, or for whole arrays at once (NumPy, torch) where Python handles one after another"
        ),
        gain=1 / (1 - fraction) if fraction < THRESHOLDS.estimated_fraction else None,
    )


def _is_beside_models(line: HotLine, measured: Measurements) -> bool:
    if SAVES.search(f"{line.line} {line.calls}"):
        return True
    if line.calls:
        return not line.calls.startswith("torch")
    return not measured.machine.accelerator  # where a line may wait for the device


@cause("same-in-every-step", "as_is", "constant_lines")
def same_in_every_step(measured: Measurements) -> Finding | None:
    """The step computes anew what depends on nothing that changes: positions, masks, graphs, anchors."""
    now, line = required(measured.as_is), required(measured.constant_lines)
    if line.fraction < THRESHOLDS.wasted_step_fraction:
        return None
    found = costs_every_step(
        "same-in-every-step",
        [line],
        now,
        "Every step computes anew what is the same in all of them: nothing of its batch goes into it.",
        "compute it once, before the loop or in the module's __init__, and keep it: self.register_buffer(...)",
    )
    evidence = f"{line.fraction:.0%} of the step's time, most of it in {line.line}"
    return replace(found, evidence=evidence) if found is not None else None


_TRAINS = re.compile(r" torch\.(utils\.data|optim|amp|autograd|_tensor|nn\.utils|_dynamo|_functorch|_inductor)\b")
"""Functions of torch that belong to training where no tensor with gradients is seen to be computed in them."""

_TRAINS_BENEATH = re.compile(
    r"^torch\.(utils\.data|optim|amp|autograd\.(?!grad_mode|profiler)|distributed|nn\.(utils|parallel)|_tensor\.Tensor\."
    r"backward|_dynamo|_functorch|_inductor)\b"
)
"""The same for what passes beneath a line, where any method of a tensor may."""


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
