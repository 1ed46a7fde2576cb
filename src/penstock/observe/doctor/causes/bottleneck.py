"""The verdict: the one bottleneck of a loop with its evidence, or that there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import required
from penstock.observe.doctor.causes.evidence import (
    OF_SAMPLES,
    describe_line,
    describe_trial,
    loading_matters,
    loading_parts_s,
    other_startup_s,
    stall_fraction,
    waits_for_processors,
)
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.trial import FREE, MORE_WORKERS, PENSTOCK, Trial
from penstock.observe.record.finding import Finding

_QUICK_BATCH_S = 0.004
"""Seconds per batch: a loader without a step that is faster than this is called healthy: few steps are shorter."""

HEALTHY = "healthy"

MEANING = {
    "waiting": "waiting in samples, for a disk, a network or a lock",
    "samples": "making samples: reading, decoding and transforming them",
    "sampler": "drawing the indices of samples, in the training process",
    "collate": "collating samples into batches",
    "transport": "transporting batches through shared memory to the loop",
    "start-up": "starting workers for every epoch",
}
REMEDY = {
    "waiting": "read larger blocks, or keep the data nearer",
    "samples": (
        "do less of it for each sample: open what it reads once in each worker, decode less (smaller files), compute "
        "before training what is the same each time, and whole batches at once (NumPy, torch) where Python takes "
        "numbers one by one"
    ),
    "sampler": (
        "prepare in the sampler's __init__ what it searches or computes for every batch: the training process does it, "
        "however many workers there are"
    ),
    "collate": "return arrays or tensors of one shape from __getitem__, so that the default collate_fn can stack them",
    "transport": "send fewer bytes (uint8 or float16, converted on the device)",
    "start-up": "let workers outlive an epoch (persistent_workers=True), or make epochs longer",
}
_SETTINGS = {
    "waiting": (MORE_WORKERS, "read ahead with more workers (num_workers=)"),
    "samples": (MORE_WORKERS, "raise num_workers"),
    "transport": (PENSTOCK, "from penstock import DataLoader"),
}


def find_bottleneck(measured: Measurements, *, has_findings: bool = False) -> Finding:
    """Return the verdict on a loop; `has_findings` if some cause asks for a change."""
    if measured.error or measured.as_is is None:
        return _unknown(measured)
    least = max(stall_fraction(measured), thresholds.OTHER_STARTUP_FRACTION)
    if measured.has_step and other_startup_s(measured) > least * (measured.as_is.batch_s or math.inf):
        return _others_start(measured)
    if measured.has_step and not loading_matters(measured):
        return _undecided(measured) or _healthy(measured)
    parts = loading_parts_s(measured)
    if not parts:
        return _of_unknown_parts(measured, has_findings=has_findings)
    if not measured.has_step and not has_findings and sum(parts.values()) < _QUICK_BATCH_S:
        return _quick(measured)
    return _bound(measured)


def _unknown(measured: Measurements) -> Finding:
    if measured.error:
        return Finding(name="fails", cause="The loop failed.", evidence=measured.error, remedy="")
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes.",
        evidence="; ".join(measured.notes) or "too few batches were timed",
        remedy="give it more time: --seconds 60",
    )


def _of_unknown_parts(measured: Measurements, *, has_findings: bool) -> Finding:
    waits = f"it waits for data {stall_fraction(measured):.0%} of its time" * measured.has_step or "no step was given"
    return Finding(
        name="unknown",
        cause="The loop waits for its loader, and the measurements do not show what loading is made of.",
        evidence="; ".join((waits, *measured.notes)),
        remedy="" if has_findings else "have dataset[0] work in the training process, where samples are looked at",
    )


def _healthy(measured: Measurements) -> Finding:
    trial, free = measured.trial(FREE), measured.gain_of(FREE)
    tried = f"; {describe_trial(measured, trial)}" if trial is not None and required(free).rounds > 1 else ""
    busy = "; other programs take the processors from its workers, and without them it would not wait"
    longest = "".join(
        f"; {line.fraction:.0%} of its step passes in {describe_line(line)}"
        for line in measured.step_lines[:1]
        if line.fraction >= thresholds.LINE_FRACTION
    )
    return Finding(
        name=HEALTHY,
        cause="The loop is bound by its own step: loading is hidden behind it.",
        evidence=(
            f"it waits for data {stall_fraction(measured):.1%} of its time{tried}"
            f"{busy if waits_for_processors(measured) else ''}{longest}"
        ),
        remedy="",
    )


def _others_start(measured: Measurements) -> Finding:
    now = required(measured.as_is)
    return Finding(
        name="start-up-bound",
        cause="Most of the loading time is spent starting the workers of another loop, such as a validation.",
        evidence=(
            f"they take {other_startup_s(measured) * 1e3:.1f} ms for each batch of this loop, which takes "
            f"{(now.batch_s or 0.0) * 1e3:.1f} ms and waits {stall_fraction(measured):.0%} of it"
        ),
        remedy="",
    )


def _undecided(measured: Measurements) -> Finding | None:
    """The loop waits, and trials with free loading disagree: other programs take the processors now and then."""
    waits, free = stall_fraction(measured), measured.gain_of(FREE)
    may_gain = free is None or (not free.is_clear and free.high >= thresholds.WORTHWHILE_GAIN)
    if waits < thresholds.CERTAIN_STALL_FRACTION or not may_gain or waits_for_processors(measured):
        return None
    trial = measured.trial(FREE)
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes: the machine is too busy, or they are too few.",
        evidence=(
            f"the loop waits for data {waits:.0%} of its time, and trials with loading free do not tell: "
            f"{describe_trial(measured, trial) if trial is not None else 'the time was over before'}"
        ),
        remedy="measure it on a quieter machine, or for longer: --seconds 60",
    )


def _quick(measured: Measurements) -> Finding:
    return Finding(
        name=HEALTHY,
        cause="The loader is quick; whether a step waits for it depends on the step, and none was given.",
        evidence=f"a batch every {(required(measured.as_is).batch_s or 0.0) * 1e3:.2f} ms",
        remedy="",
    )


def _bound(measured: Measurements) -> Finding:
    parts = _comparable_parts_s(measured)
    largest, total_s = max(parts, key=lambda part: parts[part]), sum(parts.values())
    now, free = required(measured.as_is), measured.gain_of(FREE)
    waits = f"the loop waits for data {now.wait_fraction:.0%} of its time" if measured.has_step else "the loader alone"
    is_known = measured.has_step and free is not None and free.is_clear and not measured.machine.is_busy
    if is_known and free is not None:
        waits += f"; with loading free it is {free.median:.1f} times as fast"
        waits += _delayed_step(now, required(measured.trial(FREE)), measured)
    if (now.wait_fraction or 0.0) < thresholds.STALL_FRACTION and measured.machine.is_busy and measured.has_step:
        waits += "; other programs delay its step: on a quiet machine it would be shorter, and wait"
    return Finding(
        name=f"{largest}-bound",
        cause=f"Most of the loading time is spent {MEANING[largest]}.",
        evidence=(
            f"{waits}; of {total_s * 1e3:.1f} ms of loading per batch, {MEANING[largest]} "
            f"takes {parts[largest] * 1e3:.1f} ms ({parts[largest] / total_s:.0%}){_hottest(measured, largest)}"
        ),
        remedy="",
        gain=free.median if free is not None and is_known else None,
        is_measured=is_known,
    )


def _delayed_step(now: Trial, free: Trial, measured: Measurements) -> str:
    """Return why a loop gains more by free loading than it waits for data."""
    factor = (now.step_s or 0.0) / (free.batch_s or math.inf)
    if not measured.settings.num_workers or factor < thresholds.STEP_SLOWDOWN:
        return ""
    return f", as its step takes {factor:.1f} times as long beside its workers as alone"


def _comparable_parts_s(measured: Measurements) -> Mapping[str, float]:
    """Return the parts, with the default collate's copy counted as transport where workers send batches.

    default_collate writes tensors into the segment that the batch is sent in, and most of both is the cost of the
    segment's fresh pages.
    """
    parts = dict(loading_parts_s(measured))
    samples, own = measured.samples, measured.settings
    has_tensors = samples is not None and samples.numbers_per_sample < thresholds.PYTHON_NUMBERS
    if own.collates_by_default and has_tensors and own.start_method:
        parts["transport"] = parts.get("transport", 0.0) + parts.pop("collate")
    return parts


def general_remedy(verdict: Finding, measured: Measurements) -> str:
    """Return what helps against a bottleneck in general, for when no cause explains it."""
    part, samples = verdict.name.removesuffix("-bound"), measured.samples
    trial, setting = _SETTINGS.get(part, ("", ""))
    gain = measured.gain_of(trial) if trial else None
    has_failed = gain is not None and (gain.is_loss or (gain.is_clear and gain.median < thresholds.WORTHWHILE_GAIN))
    advice = ", or ".join(filter(None, (REMEDY.get(part, ""), "" if has_failed else setting)))
    if part in OF_SAMPLES and samples is not None and samples.lines:
        return f"{describe_line(samples.lines[0])}: {advice}"
    return advice


def _hottest(measured: Measurements, part: str) -> str:
    samples = measured.samples
    if part not in OF_SAMPLES or samples is None or not samples.lines:
        return ""
    return f"; {samples.lines[0].fraction:.0%} of a sample's time passes in {describe_line(samples.lines[0])}"
