"""What several causes derive from the measurements: how much the loop waits, and what each part of a batch costs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.trial import AS_IS, FREE, Gain, Trial

_UNHIDDEN_LOADING = 2.0
"""Times the step: where loading free was not tried, a loop cannot hide what takes this much longer."""

OF_SAMPLES = ("waiting", "samples")
"""The parts of loading that are the dataset's own."""


def stall_fraction(measured: Measurements) -> float:
    """Return the fraction of the loop's time that loading costs it; 1 when there is no step to hide it.

    On an accelerator a loop may wait for its loader while the device still computes, so there only the trial with free
    loading shows what loading costs.
    """
    now = measured.as_is
    if now is None:
        return 0.0
    if not measured.has_step:
        return 1.0
    free = measured.gain_of(FREE)
    if measured.machine.accelerator and free is not None:
        return max(0.0, 1 - 1 / free.median)
    return now.wait_fraction or 0.0


def loading_matters(measured: Measurements) -> bool:
    """Return whether faster loading would make the loop faster: it waits, and free loading gains.

    On a busy machine what loading and the step need of an idle one decides, as far as that is known.
    """
    fraction, free, ratio = stall_fraction(measured), measured.gain_of(FREE), loading_to_step(measured)
    if ratio is not None and (ratio < thresholds.HIDDEN_LOADING or ratio > _UNHIDDEN_LOADING):
        return ratio > _UNHIDDEN_LOADING
    if free is None:
        return fraction >= thresholds.STALL_FRACTION
    if free.median < thresholds.WORTHWHILE_GAIN:
        return False
    if free.is_clear and free.low >= thresholds.STEP_SLOWDOWN and not measured.machine.is_busy:
        return True  # by what its workers take from the step, where it hardly waits
    is_certain = fraction >= thresholds.CERTAIN_STALL_FRACTION
    return is_certain or (fraction >= thresholds.STALL_FRACTION and free.low > 1.0)


def waits_for_processors(measured: Measurements) -> bool:
    """Return whether the loop waits only because other programs take the processors: its workers could keep up."""
    ratio = loading_to_step(measured)
    return ratio is not None and ratio < thresholds.HIDDEN_LOADING


def loading_to_step(measured: Measurements) -> float | None:
    """Return how many times as long loading takes as the step, both without what other programs take of the processors.

    None on a quiet machine, where the loop itself shows it; where the step was not timed; without workers, where
    the step hides nothing; and for samples of which some take many times as long, for which a loop waits anyway.
    """
    own, samples, free = measured.settings, measured.samples, measured.trial(FREE)
    machine = measured.machine
    if not machine.is_busy or machine.accelerator or samples is None or free is None or not own.num_workers:
        return None
    if samples.slow_fraction >= thresholds.SLOW_TIME_FRACTION:
        return None
    start_s = (epoch_startup_s(measured) or 0.0) / (own.length or math.inf)
    loading_s = samples.batch_s / _parallel(measured) + samples.sampler_s + (measured.transport_s or 0.0) + start_s
    step_s = free.idle_machine_s or 0.0
    if measured.as_is is not None and measured.as_is.step_s:  # a single window of a trial may be far off
        step_s = min(step_s, measured.as_is.step_s)
    return loading_s / max(1e-9, step_s)


def loading_parts_s(measured: Measurements) -> Mapping[str, float]:
    """Return seconds per batch of each part of loading, divided by the workers that share it.

    Parts are measured one by one, and some of them overlap; together they take no longer than the loop has for them.
    """
    parts = _parts_measured_s(measured)
    now, total_s = measured.as_is, sum(parts.values())
    if now is None or now.batch_s is None or not total_s:
        return parts
    has_workers = measured.settings.num_workers > 0 or not measured.has_step
    most_s = now.batch_s * (1.0 if has_workers else now.wait_fraction or 0.0)
    scale = min(1.0, most_s / total_s) if most_s else 1.0
    return {part: seconds * scale for part, seconds in parts.items()}


def _parts_measured_s(measured: Measurements) -> Mapping[str, float]:
    samples, own = measured.samples, measured.settings
    if samples is None:
        return {}
    parallel = _parallel(measured)
    parts = {
        # A worker that waits needs no core, so waiting is divided by all workers.
        "waiting": samples.sleep_fraction * samples.fetch_s / max(1, own.num_workers),
        "samples": (1 - samples.sleep_fraction) * samples.fetch_s / parallel,
    }
    if samples.sampler_s >= thresholds.PART_FRACTION * samples.batch_s:
        parts["sampler"] = samples.sampler_s  # in the training process, however many workers there are
    parts["collate"] = collate_s = samples.collate_s / parallel
    transport_s = transport_and_collate_s(measured)
    if transport_s is not None:
        parts["transport"] = max(0.0, transport_s - collate_s) if own.collates_by_default else transport_s
    startup_s = epoch_startup_s(measured)
    if startup_s is not None and own.length:
        parts["start-up"] = startup_s / min(own.length, batches_per_iterator(measured))
    return parts


def _parallel(measured: Measurements) -> float:
    return max(1.0, min(float(measured.settings.num_workers), measured.machine.usable_cores))


def batches_per_iterator(measured: Measurements) -> float:
    """Return how many batches the program takes from one iterator: one, with `next(iter(loader))` in a loop."""
    if measured.iterators_created <= thresholds.FEW_ITERATORS:
        return math.inf
    return max(1.0, measured.batches_requested / measured.iterators_created)


def transport_and_collate_s(measured: Measurements) -> float | None:
    """Return seconds to collate and transport one batch; never more than the whole loop took per batch."""
    now = measured.as_is
    if measured.transport_s is None or now is None or now.batch_s is None:
        return measured.transport_s
    return min(measured.transport_s, now.batch_s)


def epoch_startup_s(measured: Measurements) -> float | None:
    """Return the seconds that an epoch's start costs beyond making its first batch; None without such a start."""
    own, samples = measured.settings, measured.samples
    now = next((trial for trial in measured.trials if trial.name == AS_IS), None)
    if not own.start_method or own.persistent_workers or now is None or now.startup_s is None:
        return None
    # Starting them is computing, which takes longer by what others have of the processors.
    return max(0.0, now.startup_s * measured.machine.free_fraction - (samples.batch_s if samples else 0.0))


def other_startup_s(measured: Measurements) -> float:
    """Return the seconds per batch of the examined loop that go to starting the workers of others."""
    requested = max(1, measured.batches_requested)
    return sum(
        loop.startup_s / (loop.batches_between or requested / loop.starts)
        for loop in measured.other_loops
        if loop.starts > 1
    )


def gain_without(fraction: float, measured: Measurements, parts_of: tuple[str, ...] = OF_SAMPLES) -> float | None:
    """Return how much faster the loop is without a fraction of these parts; None where that cannot be told.

    What a loop takes beside its step is loading, however long its parts take where nothing runs beside them: they say
    how it divides. A loop takes its step, and what brings it batches, however little is left of making them.
    """
    now, free, parts = measured.as_is, measured.trial(FREE), loading_parts_s(measured)
    total_s = sum(parts.values())
    if now is None or free is None or not now.batch_s or not free.batch_s or not total_s:
        return None
    share = fraction * sum(parts.get(part, 0.0) for part in parts_of) / total_s
    workers, cores = measured.settings.num_workers, max(1.0, measured.machine.usable_cores)
    beside = 1.0 if not workers else 1 / cores if workers >= cores else 0.0
    loading_s = max(0.0, now.batch_s - beside * min(free.batch_s, now.step_s or math.inf))
    least_s = (now.step_s or 0.0) + parts.get("transport", 0.0) + parts.get("start-up", 0.0)
    left = max(least_s, now.batch_s - share * loading_s) / now.batch_s
    return 1 / min(1.0, left) if left > 1 - thresholds.ESTIMATED_FRACTION else None


def clear_factor(gain: Gain | None) -> float | None:
    """Return the gain as a finding states it: None where rounds disagree."""
    return gain.median if gain is not None and gain.is_clear else None


def describe_line(line: HotLine) -> str:
    """Return a line of the user's, with the library function in which it spends its time."""
    return f"{line.line}, in {line.calls}" if line.calls else line.line


def describe_trial(measured: Measurements, trial: Trial) -> str:
    """Return what a trial showed, as text."""
    gain = measured.gain_of(trial.name)
    if gain is None:
        return f"{trial.name}: not tried"
    return f"{trial.name}: {gain.median:.2f} times as fast ({gain.low:.2f} … {gain.high:.2f} in {gain.rounds} rounds)"


def place_of(line: str) -> str:
    """Return the file and number of a line.

    >>> place_of("train.py:12: x = load(path)")
    'train.py:12'
    """
    return line.partition(": ")[0]
