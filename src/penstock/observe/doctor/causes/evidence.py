"""What several causes derive from the measurements: how much the loop waits, and what each part of a batch costs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import AS_IS, FREE, ONE_THREAD, Gain, Trial

OF_SAMPLES = ("dataset", "storage", "decode", "transform", "coordination")
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
    """Return whether faster loading would make the loop faster: it waits, and free loading gains."""
    fraction = stall_fraction(measured)
    free = measured.gain_of(FREE)
    if waits_for_processors(measured):
        return False
    if outweighs_step(measured) or outlasts_batches_ahead(measured):
        return True
    if free is None:
        return fraction >= THRESHOLDS.stall_fraction or _cannot_be_hidden(measured)
    if free.median < THRESHOLDS.worthwhile_gain:
        return False
    if free.is_clear and free.low >= THRESHOLDS.step_slowdown and not measured.machine.is_busy:
        return True  # by what its workers take from the step, where it hardly waits
    is_certain = fraction >= THRESHOLDS.certain_stall_fraction
    return is_certain or (fraction >= THRESHOLDS.stall_fraction and free.low > 1.0)


def step_is_most(measured: Measurements) -> bool:
    """Return whether the loop hardly waits, so that its step is most of its time."""
    hardly_waits = stall_fraction(measured) < THRESHOLDS.certain_stall_fraction
    return measured.has_step and hardly_waits and not outlasts_batches_ahead(measured)


def _cannot_be_hidden(measured: Measurements) -> bool:
    """Return whether all workers together need far longer for a batch than the step.

    A loop that was measured for a short time may have lived on batches that were made ahead.
    """
    now, samples, workers = measured.as_is, measured.samples, measured.settings.num_workers
    if now is None or samples is None or not now.step_s or not workers:
        return False
    return samples.batch_s / workers > THRESHOLDS.unhidden_loading * now.step_s


def outlasts_batches_ahead(measured: Measurements) -> bool:
    """Return whether a loop hardly waits only as long as there are batches that were made ahead."""
    ratio = batches_ahead_to_step(measured)
    return ratio is not None and ratio >= THRESHOLDS.worthwhile_gain


def batches_ahead_to_step(measured: Measurements) -> float | None:
    """Return how many times as long workers need for a batch as the fastest step, if nothing shows that they keep up.

    None where something does: the loop took more batches than there may have been ahead, or a worker slept, because it
    was ahead of the loop.
    """
    now, samples, activity, own = measured.as_is, measured.samples, measured.worker_activity, measured.settings
    if now is None or samples is None or activity is None or not own.start_method or measured.machine.accelerator:
        return None
    if sum(one.batches for one in now.windows) > own.num_workers * own.prefetch_factor:
        return None
    if activity.asleep_fraction >= THRESHOLDS.ahead_fraction:
        return None
    alone = [trial for name in (FREE, ONE_THREAD) if (trial := measured.trial(name)) is not None]
    steps_s = [one.batch_s for trial in alone for one in trial.windows] or [now.step_s or math.inf]
    parallel = max(1.0, min(float(own.num_workers), measured.machine.usable_cores))
    return samples.batch_s / parallel / max(1e-9, min(steps_s))


def waits_for_processors(measured: Measurements) -> bool:
    """Return whether the loop waits only because other programs take the processors: its workers could keep up.

    That is known of samples that take about equally long: for one that takes many times as long, a loop waits anyway.
    """
    ratio, samples = _loading_to_step(measured), measured.samples
    has_workers = bool(measured.settings.start_method) and not (samples is not None and samples.slow_indices)
    return has_workers and ratio is not None and ratio < THRESHOLDS.hidden_loading_fraction


def outweighs_step(measured: Measurements) -> bool:
    """Return whether other programs delay the step, which could not hide its loading if they did not."""
    ratio, most = _loading_to_step(measured), THRESHOLDS.unhidden_loading
    if not measured.settings.num_workers and stall_fraction(measured) >= THRESHOLDS.seen_wait_fraction:
        # the step hides nothing of it
        most = THRESHOLDS.certain_stall_fraction / (1 - THRESHOLDS.certain_stall_fraction)
    return ratio is not None and ratio > most


def _loading_to_step(measured: Measurements) -> float | None:
    """Return how many times as long loading takes as the step, both without what other programs take of the processors.

    None on a quiet machine, where the loop itself shows it.
    """
    own, samples, free = measured.settings, measured.samples, step_alone(measured)
    if not measured.machine.is_busy or measured.machine.accelerator or samples is None or free is None:
        return None
    parallel = max(1.0, min(float(own.num_workers), measured.machine.usable_cores))
    loading_s = (
        samples.batch_s / parallel
        + samples.sampler_s
        + (measured.transport_s or 0.0)
        + (epoch_startup_s(measured) or 0.0) / (own.length or math.inf)
    )
    if not own.num_workers and measured.as_is is not None:  # then the loop waits for all of it
        loading_s = min(loading_s, (measured.as_is.wait_fraction or 0.0) * (measured.as_is.batch_s or 0.0))
    step_s = free.idle_machine_s or 0.0
    if measured.as_is is not None and measured.as_is.step_s:  # a single window of a trial may be far off
        step_s = min(step_s, measured.as_is.step_s)
    return loading_s / max(1e-9, step_s)


def step_alone(measured: Measurements) -> Trial | None:
    """Return the trial that shows the step: with free loading, and where threads wait for each other with one only."""
    free, one = measured.trial(FREE), measured.trial(ONE_THREAD)
    if one is None and measured.machine.intra_op_threads > 1 and free is not None and len(free.windows) < 2:
        return None  # one round of threads that wait for each other tells nothing
    both = [trial for trial in (free, one) if trial is not None]
    return min(both, key=lambda trial: trial.idle_machine_s or math.inf, default=None)


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
    parallel = max(1.0, min(float(own.num_workers), measured.machine.usable_cores))
    collate_s = samples.collate_s / parallel
    if samples.storage_fraction is None:
        parts = {"dataset": samples.fetch_s / parallel}
    else:
        parts = {
            # A worker that waits for storage needs no core, so storage is divided by all workers.
            "storage": samples.storage_fraction * samples.fetch_s / max(1, own.num_workers),
            "decode": (samples.decode_fraction or 0.0) * samples.fetch_s / parallel,
            "transform": (samples.transform_fraction or 0.0) * samples.fetch_s / parallel,
        }
        if samples.coordination_fraction:
            parts["coordination"] = samples.coordination_fraction * samples.fetch_s / max(1, own.num_workers)
    if samples.sampler_s >= THRESHOLDS.dataset_part_fraction * samples.batch_s:
        parts["sampler"] = samples.sampler_s  # in the training process, however many workers there are
    parts["collate"] = collate_s
    transport_s = transport_and_collate_s(measured)
    if transport_s is not None:
        parts["transport"] = max(0.0, transport_s - collate_s) if own.collates_by_default else transport_s
    startup_s = epoch_startup_s(measured)
    if startup_s is not None and own.length:
        parts["start-up"] = startup_s / min(own.length, batches_per_iterator(measured))
    return parts


def batches_per_iterator(measured: Measurements) -> float:
    """Return how many batches the program takes from one iterator: one, with `next(iter(loader))` in a loop."""
    if measured.iterators_created <= THRESHOLDS.few_iterators:
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


def step_slowdown(measured: Measurements) -> float | None:
    """Return how many times as long the step takes while its loader runs as with free loading; None where unknown.

    It is the lower quartile of the rounds: three rounds out of four are slowed at least this much.
    """
    now, free = measured.as_is, measured.trial(FREE)
    if now is None or free is None or measured.machine.accelerator:
        return None
    factors = sorted(
        (one.step_s / one.batches) / (other.step_s / other.batches)
        for one, other in zip(now.windows, free.windows, strict=False)
        if other.step_s
    )
    return factors[len(factors) // 4] if len(factors) > 2 else None


def oversubscribes_cores(measured: Measurements) -> bool:
    """Return whether step and workers together need more cores than there are, and the loop loses time by it.

    While its loader runs, a step also frees the last batch's memory, which it never does with free loading: the loss
    has to exceed that.
    """
    now, free, own = measured.as_is, measured.trial(FREE), measured.settings
    if now is None or free is None or not own.num_workers:
        return False
    if own.num_workers + measured.machine.intra_op_threads <= measured.machine.usable_cores:
        return False
    lost_s = (now.step_s or 0.0) - (free.batch_s or 0.0)
    return lost_s > THRESHOLDS.contention_fraction * (now.batch_s or 0.0)


def gain_without(fraction: float, measured: Measurements, parts_of: tuple[str, ...] = OF_SAMPLES) -> float | None:
    """Return how much faster the loop is without a fraction of these parts; None beyond what an estimate can tell.

    What a loop takes beside its step is loading, however long its parts take where nothing runs beside them: they say
    how it divides. Of a step, workers hide all but what it takes of the cores that they use. However little is left of
    making batches, the loop takes its step, and what brings it batches.
    """
    now, free, parts = measured.as_is, measured.trial(FREE), loading_parts_s(measured)
    total_s = sum(parts.values())
    share = 1.0 if fraction >= THRESHOLDS.estimated_fraction else fraction  # the rest is within the error of looking
    if total_s:
        share *= sum(parts.get(part, 0.0) for part in parts_of) / total_s
    left = 1 - share
    if now is not None and free is not None and now.batch_s and free.batch_s:
        workers, cores = measured.settings.num_workers, max(1.0, measured.machine.usable_cores)
        beside = 1.0 if not workers else 1 / cores if workers >= cores else 0.0
        loading_s = max(0.0, now.batch_s - beside * min(free.batch_s, now.step_s or math.inf))
        least_s = (now.step_s or 0.0) + parts.get("transport", 0.0) + parts.get("start-up", 0.0)
        left_s = now.batch_s - share * loading_s
        slowdown = step_slowdown(measured) or (now.step_s or 0.0) / free.batch_s  # of two rounds, what there is
        if least_s > left_s and slowdown >= THRESHOLDS.step_slowdown:
            return None  # the step, too, gets faster by as much as nobody knows
        left = max(least_s, left_s) / now.batch_s
    return 1 / min(1.0, left) if left > 1 - THRESHOLDS.estimated_fraction else None


def clear_factor(gain: Gain | None) -> float | None:
    """Return the gain as a finding states it: None where rounds disagree."""
    return gain.median if gain is not None and gain.is_clear else None


def is_unclear(gain: Gain | None) -> bool:
    """Return whether a change was tried, and its rounds disagree."""
    return gain is not None and not gain.is_clear


def describe_line(line: HotLine) -> str:
    """Return a line of the user's, with the library function in which it spends its time."""
    return f"{line.line}, in {line.calls}" if line.calls else line.line


def shrink_first(measured: Measurements) -> str:
    """Return advice where costly lines handle far more numbers than their sample keeps; else nothing."""
    samples = measured.samples
    if samples is None or not samples.values_per_sample:
        return ""
    most = THRESHOLDS.shrunk_pixel_ratio * samples.values_per_sample
    large = [line for line in samples.lines if line.values >= most and not SHRINKS.search(line.line)]
    if sum(line.fraction for line in large) < THRESHOLDS.line_fraction:
        return ""
    return (
        f"where it is cropped or made smaller later, do that first (lines that take "
        f"{sum(line.fraction for line in large):.0%} of a sample's time have {max(line.values for line in large)} "
        f"numbers at hand, and the sample keeps {samples.values_per_sample})"
    )


SHRINKS = re.compile(
    r"resize|crop|thumbnail|interpolate|reduce|pool|stft| @ |matmul|einsum|\.(mean|sum|max|min|std)\(", re.IGNORECASE
)
"""Lines that make few numbers of many."""


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
