"""The verdict: the one bottleneck of a loop with its evidence, or that there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from penstock.observe.doctor.causes.cause import required
from penstock.observe.doctor.causes.epochs import short_epochs
from penstock.observe.doctor.causes.evidence import (
    batches_ahead_to_step,
    describe_line,
    describe_trial,
    epoch_startup_s,
    is_unclear,
    loading_matters,
    loading_parts_s,
    other_startup_s,
    outlasts_batches_ahead,
    outweighs_step,
    shrink_first,
    stall_fraction,
    waits_for_processors,
)
from penstock.observe.doctor.causes.processors import cpu_contention
from penstock.observe.doctor.causes.samples import bulk
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import FREE, MORE_WORKERS, ONE_THREAD, PENSTOCK, PERSISTENT, Trial, gain_between
from penstock.observe.record.finding import Finding

HEALTHY = "healthy"

MEANING = {
    "dataset": "making samples",
    "storage": "reading samples and waiting for storage",
    "decode": "decoding samples",
    "transform": "transforming samples",
    "coordination": "waiting for other threads and processes",
    "sampler": "drawing the indices of samples, in the training process",
    "collate": "collating samples into batches",
    "transport": "transporting batches through shared memory to the loop",
    "start-up": "starting workers for every epoch",
}
REMEDY = {
    "dataset": "make samples cheaper",
    "storage": "read larger blocks, or keep the data nearer",
    "decode": "open files once and decode less (smaller files, a reduced decode), or use a faster decoder",
    "transform": (
        "compute it before training, or once in __init__ where it is the same for all samples; what is random, for a "
        "whole batch at once (NumPy, torch)"
    ),
    "coordination": "let each worker have what it needs, without a lock or another process in between",
    "sampler": (
        "prepare in the sampler's __init__ what it searches or computes for every batch: the training process does it, "
        "however many workers there are"
    ),
    "collate": "return arrays or tensors of one shape from __getitem__, so that the default collate_fn can stack them",
    "transport": "send fewer bytes (uint8 or float16, converted on the device)",
    "start-up": "let workers outlive an epoch, or make epochs longer",
}
RANDOM_REMEDY = (
    "perhaps there is nothing to change but more processor cores; what of it needs no random numbers can be made once, "
    "before training, and the rest for whole batches in the step, on an accelerator"
)
"""For transforming samples where what takes long is random, and a library's work."""

_SETTINGS = {
    "dataset": (MORE_WORKERS, "raise num_workers"),
    "storage": (MORE_WORKERS, "read ahead with more workers (num_workers=)"),
    "decode": (MORE_WORKERS, "raise num_workers"),
    "transform": (MORE_WORKERS, "raise num_workers"),
    "transport": (PENSTOCK, "from penstock import DataLoader"),
    "start-up": (PERSISTENT, "persistent_workers=True"),
}


def find_bottleneck(measured: Measurements, *, has_findings: bool = False) -> Finding:
    """Return the verdict on a loop; `has_findings` if some cause asks for a change."""
    if measured.error or measured.hang is not None or measured.as_is is None:
        return _unknown(measured)
    least = max(stall_fraction(measured), THRESHOLDS.other_startup_fraction)
    if measured.has_step and other_startup_s(measured) > least * (measured.as_is.batch_s or math.inf):
        return _others_start(measured)
    if measured.has_step and not loading_matters(measured):
        return cpu_contention.find(measured) or _undecided(measured) or _healthy(measured)
    parts = loading_parts_s(measured)
    if not parts:
        return _of_unknown_parts(measured, has_findings=has_findings)
    if not measured.has_step and not has_findings and sum(parts.values()) < THRESHOLDS.quick_batch_s:
        return _quick(measured)
    return _bound(measured)


def _unknown(measured: Measurements) -> Finding:
    if measured.error:
        return Finding(name="fails", cause="The loop failed.", evidence=measured.error, remedy="")
    if measured.hang is not None:
        return Finding(
            name="workers-hang",
            cause="The loop waits for its workers, and they are blocked forever.",
            evidence=f"it had waited for {measured.hang.waited_s:.0f} s when it was ended",
            remedy="",
        )
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes.",
        evidence="; ".join(measured.notes) or "no batch was timed",
        remedy="give it more time: --seconds 60",
    )


def _of_unknown_parts(measured: Measurements, *, has_findings: bool) -> Finding:
    waits = (
        f"it waits for data {stall_fraction(measured):.0%} of its time" if measured.has_step else "no step was given"
    )
    start_s, other_s = _waits_s(measured)
    if measured.has_step and start_s > other_s:
        return Finding(
            name="start-up-bound",
            cause=f"Most of the loading time is spent {MEANING['start-up']}.",
            evidence=(
                f"{waits}; starting workers takes {start_s * 1e3:.1f} ms for each batch, and between two starts the "
                f"loop waits {other_s * 1e3:.1f} ms for one"
            ),
            remedy="",
        )
    return Finding(
        name="unknown",
        cause="The loop waits for its loader, and the measurements do not show what loading is made of.",
        evidence="; ".join((waits, *measured.notes)),
        remedy="" if has_findings else "have dataset[0] work in the training process, where samples are looked at",
    )


def _waits_s(measured: Measurements) -> tuple[float, float]:
    """Return the seconds per batch that an epoch's start takes, and that the loop waits for the other batches."""
    start_s = (epoch_startup_s(measured) or 0.0) / (measured.settings.length or math.inf)
    return start_s, required(measured.as_is).wait_within_epoch_s or 0.0


def _healthy(measured: Measurements) -> Finding:
    free = measured.gain_of(FREE)
    tried = ""
    if free is not None and free.rounds > 1:
        tried = f"; with loading free it is {free.median:.2f} times as fast ({free.low:.2f} … {free.high:.2f})"
    lines = [line for line in measured.step_lines if line.fraction >= THRESHOLDS.line_fraction]
    longest = "".join(f"; {line.fraction:.0%} of its step passes in {describe_line(line)}" for line in lines[:1])
    if not measured.settings.kind:
        return Finding(
            name=HEALTHY,
            cause="The program has no DataLoader: it makes its batches by itself, in its steps.",
            evidence=f"a step every {(required(measured.as_is).batch_s or 0.0) * 1e3:.1f} ms{longest}",
            remedy="",
        )
    most = THRESHOLDS.worthwhile_gain / max(1e-9, 1 - stall_fraction(measured))
    if tried and not measured.settings.num_workers and required(free).median >= most:
        tried += ", more than what it waits: the time of its steps varies with other programs"
    busy = "; other programs take the processors from its workers, and without them it would not wait"
    return Finding(
        name=HEALTHY,
        cause="The loop is bound by its own step: loading is hidden behind it.",
        evidence=(
            f"it waits for data {stall_fraction(measured):.1%} of its time{tried}"
            f"{busy if waits_for_processors(measured) else ''}{longest}"
        ),
        remedy="",
        gain=free.median if free is not None else None,
        is_measured=free is not None,
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
    starts_often = measured.settings.start_method and short_epochs.find(measured) is not None
    if starts_often or _may_wait_later(measured):  # there may have been no start so far
        return _unproven(measured)
    # Threads of a step that others delay wait for each other: one round may show nothing else.
    is_one_round = (free is None or free.rounds < 2) and measured.machine.intra_op_threads > 1
    may_hide = is_one_round and measured.machine.is_busy and measured.settings.num_workers > 0
    waits_enough = may_hide or waits >= THRESHOLDS.certain_stall_fraction
    if not waits_enough or not (may_hide or is_unclear(free)) or waits_for_processors(measured):
        return None
    trial = measured.trial(FREE)
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes: the machine is too busy.",
        evidence=(
            f"the loop waits for data {waits:.0%} of its time, and trials with loading free do not tell: "
            f"{describe_trial(measured, trial) if trial is not None else 'the time was over before'}"
        ),
        remedy="measure it on a quieter machine, or for longer: --seconds 60",
    )


def seen_too_little(measured: Measurements) -> Finding | None:
    """Other programs slow torch's threads down so much that the loop got through a part of an epoch only."""
    free, one, own = measured.trial(FREE), measured.trial(ONE_THREAD), measured.settings
    gain = gain_between(free, one) if free is not None and one is not None else None
    if not measured.machine.is_busy or gain is None or gain.median < THRESHOLDS.crowded_step:
        return None
    if own.length is None or measured.batches_requested > own.length:
        return None
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes: the machine is too busy.",
        evidence=(
            f"the loop hardly waits for data, but other programs make its step {gain.median:.1f} times as long, by "
            f"making torch's threads wait for each other; so it got {measured.batches_requested} of the {own.length} "
            "batches of an epoch, and nothing is known of what grows, or of what comes once in an epoch"
        ),
        remedy="measure it on a quieter machine, or for longer with OMP_NUM_THREADS=1: --seconds 60",
    )


def _may_wait_later(measured: Measurements) -> bool:
    """Return whether a loop with workers hardly waited, and nothing shows that it would not in a longer time."""
    free, ratio = measured.gain_of(FREE), batches_ahead_to_step(measured)
    if not measured.settings.start_method or waits_for_processors(measured):
        return False
    gained = free is not None and free.rounds < 2 and free.median >= THRESHOLDS.step_slowdown
    return gained or (ratio is not None and ratio >= THRESHOLDS.hidden_loading_fraction)


def _unproven(measured: Measurements) -> Finding:
    now, own, trial = required(measured.as_is), measured.settings, measured.trial(FREE)
    taken = sum(one.batches for one in now.windows)
    return Finding(
        name="unknown",
        cause="The measurements do not show where the time goes: they are too few.",
        evidence=(
            f"the loop took {taken} batches, of which {own.num_workers * own.prefetch_factor} may have been ahead, "
            f"and waited {stall_fraction(measured):.0%} of its time; "
            f"{describe_trial(measured, trial) if trial is not None else 'loading free: the time was over before'}"
        ),
        remedy="give it more time: --seconds 60",
    )


def _quick(measured: Measurements) -> Finding:
    now = measured.as_is
    assert now is not None
    return Finding(
        name=HEALTHY,
        cause="The loader is quick; whether a step waits for it depends on the step, and none was given.",
        evidence=f"a batch every {(now.batch_s or 0.0) * 1e3:.2f} ms",
        remedy="",
    )


def _bound(measured: Measurements) -> Finding:
    parts = _comparable_parts_s(measured)
    largest = max(parts, key=lambda part: parts[part])
    total_s = sum(parts.values())
    free = measured.gain_of(FREE)
    now = measured.as_is
    assert now is not None
    waits = f"the loop waits for data {now.wait_fraction:.0%} of its time" if measured.has_step else "the loader alone"
    if measured.has_step and free is not None:
        waits += f"; with loading free it is {free.median:.1f} times as fast"
        waits += _delayed_step(now, required(measured.trial(FREE)), measured)
    if outweighs_step(measured) and (now.wait_fraction or 0.0) < THRESHOLDS.stall_fraction:
        waits += "; other programs delay its step: on a quiet machine it would be shorter, and wait"
    tells = measured.has_step and free is not None and not (is_unclear(free) and outlasts_batches_ahead(measured))
    if outlasts_batches_ahead(measured) and (now.wait_fraction or 0.0) < THRESHOLDS.stall_fraction:
        waits += f"; it took {sum(one.batches for one in now.windows)} batches, which may have been made ahead: no "
        waits += "worker ever was ahead of it, and together they need longer for a batch than its step"
    return Finding(
        name=f"{largest}-bound",
        cause=f"Most of the loading time is spent {MEANING[largest]}.",
        evidence=(
            f"{waits}; of {total_s * 1e3:.1f} ms of loading per batch, {MEANING[largest]} "
            f"takes {parts[largest] * 1e3:.1f} ms ({parts[largest] / total_s:.0%}){_hottest(measured, largest)}"
        ),
        remedy="",
        gain=free.median if free is not None and tells else None,
        is_measured=tells,
    )


def _delayed_step(now: Trial, free: Trial, measured: Measurements) -> str:
    """Return why a loop gains more by free loading than it waits for data."""
    factor = (now.step_s or 0.0) / (free.batch_s or math.inf)
    if not measured.settings.num_workers or factor < THRESHOLDS.step_slowdown:
        return ""
    return f", as its step takes {factor:.1f} times as long beside its workers as alone"


def _comparable_parts_s(measured: Measurements) -> Mapping[str, float]:
    """Return the parts, with the default collate's copy counted as transport where workers send batches.

    default_collate writes tensors into the segment that the batch is sent in, and most of both is the cost of the
    segment's fresh pages.
    """
    parts = dict(loading_parts_s(measured))
    samples = measured.samples
    copies = (
        measured.settings.collates_by_default
        and samples is not None
        and samples.numbers_per_sample < THRESHOLDS.python_numbers
    )
    if copies and measured.settings.start_method:
        parts["transport"] = parts.get("transport", 0.0) + parts.pop("collate")
    return parts


def bound_by_starts(verdict: Finding, first: Finding) -> Finding:
    """Return the verdict, or another where it is about the step, and the first finding is that workers start often."""
    is_about_step = verdict.name in (HEALTHY, "unknown", cpu_contention.name)
    if not is_about_step or first.name != short_epochs.name or not first.asks_for_change:
        return verdict
    cause = f"Most of the loading time is spent {MEANING['start-up']}."
    return replace(first, name="start-up-bound", cause=cause, remedy="")


def general_remedy(verdict: Finding, measured: Measurements) -> str:
    """Return what helps against a bottleneck in general, for when no cause explains it."""
    part = verdict.name.removesuffix("-bound")
    samples = measured.samples
    of_samples = part in ("storage", "decode", "transform", "coordination")
    if of_samples and samples is not None and samples.median_s < THRESHOLDS.costly_sample_s:
        return f"make a whole batch at once, as each sample is cheap: {bulk(measured)}"
    if of_samples and samples is not None and samples.lines:
        is_random = samples.lines[0].is_random and part == "transform"
        return RANDOM_REMEDY if is_random else f"{describe_line(samples.lines[0])}: {_advice(part, measured)}"
    return _advice(part, measured)


def _advice(part: str, measured: Measurements) -> str:
    """Return what helps, with the setting that usually does unless its trial gained nothing."""
    trial, setting = _SETTINGS.get(part, ("", ""))
    gain = measured.gain_of(trial) if trial else None
    has_failed = gain is not None and (gain.median < 1.0 or gain.is_negligible)
    first = shrink_first(measured) if part in ("decode", "transform") else ""
    return ", or ".join(filter(None, (first, REMEDY.get(part, ""), "" if has_failed else setting)))


def _hottest(measured: Measurements, part: str) -> str:
    samples = measured.samples
    if part in ("sampler", "collate", "transport", "start-up") or samples is None or not samples.hotspots:
        return ""
    if samples.lines:
        return f"; {samples.lines[0].fraction:.0%} of a sample's time passes in {describe_line(samples.lines[0])}"
    hottest = samples.hotspots[0]
    caller = f", called by {hottest.caller}," if hottest.caller else " alone"
    return f"; {hottest.where}{caller} is {hottest.fraction:.0%} of the dataset's time"
