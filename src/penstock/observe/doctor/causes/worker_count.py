"""Causes that lie in the number of workers: too many, too few, none, or none needed."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import (
    clear_factor,
    describe_line,
    describe_trial,
    loading_matters,
    transport_and_collate_s,
)
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine
from penstock.observe.doctor.trial import FEWER_WORKERS, FREE, MORE_WORKERS, PENSTOCK, Gain
from penstock.observe.doctor.worker_estimate import LoopTimes, fitting_workers, gain_of_workers, workers_to_try
from penstock.observe.record.finding import Finding

_FEWER_WORKERS_KEEP = 0.95
"""Times as fast: fewer workers are recommended if they are not slower than this."""
_INLINE_BATCH_S = 0.003
"""Seconds per batch: transporting a batch from a worker costs up to this, so a cheaper one needs no worker."""
_SMALL_BATCH_NBYTES = 4 << 20
"""Bytes: for larger batches the copy is the cost, and not the message."""
_REPEATED_WORK = 0.6
"""Of a batch's time, for each worker: workers that all make the whole stream take one for each."""
_LEAST_REPEATED_WORK = 1.6
"""Times a batch's time: workers that share cores and caches with each other and the step take longer, too."""
_SERIAL_FACTOR = 2.0
"""Times as long: workers that wait side by side lose less to the machine; those that take turns lose more."""
_ASLEEP_FRACTION = 0.4
"""Of a worker's time: of two workers that share a lock each sleeps for half, while the other one has it."""


@cause("each-worker-reads-all", "samples", "as_is", "worker_activity")
def each_reads_all(measured: Measurements) -> Finding | None:
    """Workers of a stream make all of its samples, and each keeps its own part of them.

    Source: the examples of `torch.utils.data.IterableDataset`, in which each worker gets a range of its own.
    """
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    if not own.is_iterable or own.num_workers < 2 or not loading_matters(measured):
        return None
    # The processor time of all workers for a batch, at the least: they may have made some ahead of the loop.
    made_s = required(measured.worker_activity).making_cores * sum(window.wall_s for window in now.windows)
    made_s /= sum(window.batches for window in now.windows) + own.num_workers * own.prefetch_factor
    times = made_s / max(1e-9, samples.batch_s)
    if times < max(_REPEATED_WORK * own.num_workers, _LEAST_REPEATED_WORK):
        return None
    return Finding(
        name="each-worker-reads-all",
        cause="Workers do more than the samples that they return: each makes the whole stream, and keeps its part.",
        evidence=(
            f"{own.num_workers} workers use {made_s * 1e3:.1f} ms of processor time for a batch that one process makes "
            f"in {samples.batch_s * 1e3:.1f} ms{_longest_line(samples.lines)}"
        ),
        remedy=(
            "give each worker files, shards or a range of its own, by torch.utils.data.get_worker_info(); or leave out "
            "a sample that is another worker's before it is read and decoded"
        ),
    )


@cause("too-many-workers")
def too_many_workers(measured: Measurements) -> Finding | None:
    """There are more workers than cores, and fewer are as fast."""
    own, usable = measured.settings, measured.machine.usable_cores
    if not own.start_method or own.num_workers <= usable:
        return None
    if measured.samples is not None and _loop_times(measured).waits:  # workers that wait share no core
        return None
    trial, gain = measured.trial(FEWER_WORKERS), measured.gain_of(FEWER_WORKERS)
    fewer = fitting_workers(usable)
    if fewer >= own.num_workers:
        return None
    is_tried = gain is not None and gain.is_clear
    if not (required(gain).median >= _FEWER_WORKERS_KEEP if is_tried else _hides_loading(measured, fewer)):
        return None
    setting = trial.line if trial is not None else f"num_workers={fewer}"
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores, and fewer would be as fast: they share cores, and each takes memory.",
        evidence=f"{own.num_workers} workers on {usable:g} cores{_tried(measured, FEWER_WORKERS)}",
        remedy=setting,
        gain=clear_factor(gain),
        is_measured=is_tried,
        is_uncertain=gain is not None and not is_tried,
    )


def _hides_loading(measured: Measurements, workers: int) -> bool:
    """Return whether `workers` workers would load faster than the step computes."""
    samples, free = measured.samples, measured.trial(FREE)
    if samples is None or free is None or free.batch_s is None:
        return False
    parallel = min(float(workers), measured.machine.usable_cores)
    return samples.batch_s / parallel < thresholds.HIDDEN_LOADING * free.batch_s


@cause("no-workers", "samples")
def no_workers(measured: Measurements) -> Finding | None:
    """Expensive samples are made in the training process."""
    samples, machine = required(measured.samples), measured.machine
    if measured.settings.num_workers or machine.usable_cores < 2 or not loading_matters(measured):
        return None
    gain = measured.gain_of(MORE_WORKERS)
    if samples.batch_s < _INLINE_BATCH_S or _is_refuted(gain):
        return None
    times = _loop_times(measured)
    workers = workers_to_try(times, machine.usable_cores)
    waits = f", {samples.sleep_fraction:.0%} of it waiting" if times.waits else ""
    return Finding(
        name="no-workers",
        cause="Samples are made in the training process itself, and the step waits meanwhile.",
        evidence=(
            f"num_workers=0, and a batch takes {samples.batch_s * 1e3:.1f} ms to make{waits}"
            f"{_tried(measured, MORE_WORKERS)}"
        ),
        remedy=f"num_workers={workers}",
        gain=clear_factor(gain) if workers == 2 else None,
        is_measured=clear_factor(gain) is not None and workers == 2,
    )


def _loop_times(measured: Measurements) -> LoopTimes:
    samples, free, now = required(measured.samples), measured.trial(FREE), measured.as_is
    step_s = free.batch_s if free is not None and free.batch_s else samples.batch_s / 4
    return LoopTimes(
        step_s=step_s,
        loading_s=samples.batch_s,
        asleep_s=samples.sleep_fraction * samples.batch_s,
        loop_s=(now.batch_s if now is not None else None) or samples.batch_s + step_s,
    )


@cause("too-few-workers", "samples", "as_is")
def waiting_samples(measured: Measurements) -> Finding | None:
    """Samples wait for a disk or a network, and more workers would wait side by side."""
    own, samples, gain = measured.settings, required(measured.samples), measured.gain_of(MORE_WORKERS)
    if not own.num_workers or own.is_iterable or not loading_matters(measured) or _is_refuted(gain):
        return None
    times, cores = _loop_times(measured), measured.machine.usable_cores
    workers = workers_to_try(times, cores, own.num_workers)
    if not times.waits or workers == own.num_workers or _sleep_for_each_other(measured):
        return None
    return Finding(
        name="too-few-workers",
        cause="Samples wait, for a disk, a network or a server, and more workers would wait side by side.",
        evidence=(
            f"{samples.sleep_fraction:.0%} of a sample's time is waiting, which needs no core; {own.num_workers} "
            f"worker{'s' * (own.num_workers > 1)}{_tried(measured, MORE_WORKERS)}"
        ),
        remedy=f"num_workers={workers}, or penstock.DataLoader(..., num_workers='auto')",
        gain=min(workers / own.num_workers, gain_of_workers(times, workers, cores)),
    )


@cause("workers-cost-more", "samples", "transport_s")
def workers_cost_more(measured: Measurements) -> Finding | None:
    """Batches are so cheap that transporting them costs more than making them."""
    samples, own = required(measured.samples), measured.settings
    transport_s, gain = required(transport_and_collate_s(measured)), measured.gain_of(FEWER_WORKERS)
    trial = measured.trial(FEWER_WORKERS)
    is_tried = trial is not None and trial.line == "num_workers=0"
    if not own.num_workers or not loading_matters(measured) or (is_tried and _is_refuted(gain)):
        return None
    is_cheap = samples.batch_nbytes <= _SMALL_BATCH_NBYTES and samples.batch_s < _INLINE_BATCH_S
    if not is_cheap or samples.batch_s > transport_s:
        return None
    return Finding(
        name="workers-cost-more",
        cause="A batch is so cheap that transporting it from a worker costs more than making it.",
        evidence=(
            f"making a batch of {samples.batch_samples} takes {samples.batch_s * 1e3:.2f} ms in one process, "
            f"transporting it from {own.num_workers} workers takes {transport_s * 1e3:.2f} ms"
            f"{_tried(measured, FEWER_WORKERS) * is_tried}"
        ),
        remedy="num_workers=0; or a larger batch_size, so that more samples share the cost",
        gain=clear_factor(gain) if is_tried else None,
        is_measured=is_tried and clear_factor(gain) is not None,
    )


@cause("workers-do-not-scale", "samples", "as_is")
def workers_do_not_scale(measured: Measurements) -> Finding | None:
    """Workers sleep far longer than their samples do: they wait for each other, one at a time."""
    samples, own, now = required(measured.samples), measured.settings, required(measured.as_is)
    if not loading_matters(measured) or not _sleep_for_each_other(measured):
        return None
    activity = required(measured.worker_activity)
    return Finding(
        name="workers-do-not-scale",
        cause="Several workers are hardly faster than one: they wait for each other, or for something that they share.",
        evidence=(
            f"one process makes a batch in {samples.batch_s * 1e3:.1f} ms, {own.num_workers} workers together need "
            f"{(now.batch_s or 0.0) * 1e3:.1f} ms, and each of them sleeps at least {activity.asleep_fraction:.0%} of "
            f"its time{_tried(measured, MORE_WORKERS)}"
        ),
        remedy=(
            "look for what workers share, and give each its own (a lock, a connection, a server that answers one "
            f"request at a time){_longest_line(samples.lines)}"
        ),
    )


def _sleep_for_each_other(measured: Measurements) -> bool:
    """Return whether every worker sleeps for much of its time while the loop waits, and far longer than its samples do.

    That holds on a busy machine, too, where a worker that computes is not asleep while it waits for a processor.
    """
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    activity = measured.worker_activity
    if activity is None or own.num_workers < 2 or own.is_iterable or samples.slow_indices:
        return False
    if samples.batch_s < _INLINE_BATCH_S:  # they sleep because there is hardly anything to do
        return False
    if (now.wait_fraction or 0.0) < thresholds.BUSY_WORKERS or activity.asleep_fraction < _ASLEEP_FRACTION:
        return False  # workers that are ahead of the loop sleep as well
    asleep_s = activity.asleep_fraction * own.num_workers * (now.batch_s or 0.0)
    own_s = samples.sleep_fraction * samples.batch_s + (transport_and_collate_s(measured) or 0.0)
    return asleep_s > _SERIAL_FACTOR * own_s


def _tried(measured: Measurements, name: str) -> str:
    trial = measured.trial(name)
    return f"; {describe_trial(measured, trial)}" if trial is not None and measured.gain_of(name) is not None else ""


def _longest_line(lines: tuple[HotLine, ...]) -> str:
    return f"; most of a sample's time passes in {describe_line(lines[0])}" if lines else ""


def _is_refuted(gain: Gain | None) -> bool:
    """Return whether a trial of the change showed that it gains too little."""
    return gain is not None and (gain.is_loss or (gain.is_clear and gain.median < thresholds.WORTHWHILE_GAIN))


@dataclass(frozen=True, slots=True)
class BetterSetting:
    """A trial with other workers that was faster than all the others, and clearly faster than the loop as it is."""

    name: str
    """Of its finding."""

    trial: str
    """The trial's name."""

    cause: str
    """What the finding states."""

    needs: tuple[str, ...] = ()

    def find(self, measured: Measurements) -> Finding | None:
        """Return the finding if this trial gained the most of `BETTER_SETTINGS`."""
        gains = {one.trial: gain for one in BETTER_SETTINGS if (gain := measured.gain_of(one.trial)) is not None}
        best = max((one for one in gains if gains[one].pays()), key=lambda one: gains[one].median, default=None)
        if best != self.trial or not loading_matters(measured):
            return None
        covers = waiting_samples if measured.settings.num_workers else no_workers  # they know how many more
        if self.trial == MORE_WORKERS and measured.samples is not None and covers.find(measured) is not None:
            return None
        trial = required(measured.trial(self.trial))
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=describe_trial(measured, trial),
            remedy=trial.line,
            gain=gains[self.trial].median,
            is_measured=True,
        )


BETTER_SETTINGS = (
    BetterSetting("too-few-workers", MORE_WORKERS, "More workers would load faster."),
    BetterSetting("penstock-faster", PENSTOCK, "penstock's DataLoader loads the same batches faster."),
    BetterSetting("too-many-workers", FEWER_WORKERS, "Loading is faster with fewer workers."),
)
