"""Causes that lie in the number and the kind of workers: too many, too few, none, or none needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.core.units import size_text
from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.causes.evidence import (
    clear_factor,
    describe_line,
    describe_trial,
    is_unclear,
    loading_matters,
    loading_parts_s,
    outweighs_step,
    oversubscribes_cores,
    place_of,
    transport_and_collate_s,
)
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine, SharedLock
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import (
    FEWER_WORKERS,
    FREE,
    MORE_WORKERS,
    NO_WORKERS,
    PENSTOCK,
    PROCESSES,
    THREADS,
    Gain,
)
from penstock.observe.doctor.worker_estimate import LoopTimes, gain_of_workers, workers_to_try
from penstock.observe.record.finding import Finding


@cause("each-worker-reads-all", "samples", "as_is")
def each_reads_all(measured: Measurements) -> Finding | None:
    """Workers of a stream make all of its samples, and each keeps its own part of them.

    Source: the examples of `torch.utils.data.IterableDataset`, in which each worker gets a range of its own.
    """
    own, samples = measured.settings, required(measured.samples)
    if not own.is_iterable or own.num_workers < 2:
        return None
    if not loading_matters(measured) and not oversubscribes_cores(measured):  # which slows a step that need not wait
        return None
    times, evidence = _repeated_work(measured)
    if times < max(THRESHOLDS.repeated_work * own.num_workers, THRESHOLDS.least_repeated_work):
        return None
    return Finding(
        name="each-worker-reads-all",
        cause="Workers do more than the samples that they return: each makes the whole stream, and keeps its part.",
        evidence=f"{evidence}{_longest_line(samples.lines)}",
        remedy=(
            "give each worker files, shards or a range of its own, by torch.utils.data.get_worker_info(); or leave out "
            "a sample that is another worker's before it is read and decoded"
        ),
    )


def _repeated_work(measured: Measurements) -> tuple[float, str]:
    """Return how many times over a stream's workers make its samples, and what shows it."""
    workers, samples, share = measured.settings.num_workers, required(measured.samples), measured.worker_share
    if share is not None:
        return share.times, (
            f"one of {workers} workers takes {share.sample_s * 1e3:.3f} ms for each sample that it returns, and "
            f"{share.alone_s * 1e3:.3f} ms where it is the only one"
        )
    made_s = _made_s(measured)
    return made_s / max(1e-9, samples.batch_s), (
        f"{workers} workers use {made_s * 1e3:.1f} ms of processor time for a batch that one process makes in "
        f"{samples.batch_s * 1e3:.1f} ms"
    )


def _made_s(measured: Measurements) -> float:
    """Return the processor time of all workers for a batch, at the least: they may have made some ahead of the loop."""
    own, now, activity = measured.settings, required(measured.as_is), measured.worker_activity
    if activity is None:
        return 0.0
    made_s = activity.making_cores * sum(window.wall_s for window in now.windows)
    return made_s / (sum(window.batches for window in now.windows) + own.num_workers * own.prefetch_factor)


@cause("too-many-workers")
def too_many_workers(measured: Measurements) -> Finding | None:
    """There are more workers than cores, and fewer are as fast."""
    own, usable = measured.settings, measured.machine.usable_cores
    if not own.start_method or own.num_workers <= usable:
        return None
    if measured.samples is not None and _loop_times(measured).waits:  # workers that wait share no core
        return None
    trial, gain = measured.trial(FEWER_WORKERS), measured.gain_of(FEWER_WORKERS)
    fewer = max(1, round(THRESHOLDS.workers_per_core * usable))
    if fewer >= own.num_workers:
        return None
    is_tried = gain is not None and gain.is_clear
    if not (required(gain).median >= THRESHOLDS.fewer_workers_keep if is_tried else _hides_loading(measured, fewer)):
        return None
    setting = trial.line if trial is not None else f"num_workers={fewer}"
    tried = f"; with {setting} it is {gain.median:.2f} times as fast" if gain is not None else ""
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores, and fewer would be as fast: they share cores, and each takes memory.",
        evidence=f"{own.num_workers} workers on {usable:g} cores{tried}",
        remedy=setting,
        gain=clear_factor(gain),
        is_measured=clear_factor(gain) is not None,
        is_uncertain=is_unclear(gain),
    )


def _hides_loading(measured: Measurements, workers: int) -> bool:
    """Return whether `workers` workers would load faster than the step computes."""
    samples, free = measured.samples, measured.trial(FREE)
    if samples is None or free is None or free.batch_s is None:
        return False
    parallel = min(float(workers), measured.machine.usable_cores)
    return samples.batch_s / parallel < THRESHOLDS.hidden_loading_fraction * free.batch_s


@cause("no-workers", "samples")
def no_workers(measured: Measurements) -> Finding | None:
    """Expensive samples are made in the training process."""
    samples, machine = required(measured.samples), measured.machine
    if measured.settings.num_workers or machine.usable_cores < 2 or not loading_matters(measured):
        return None
    gain = measured.gain_of(MORE_WORKERS)
    if samples.batch_s < THRESHOLDS.inline_batch_s or _is_refuted(gain):
        return None
    times = _loop_times(measured)
    workers = workers_to_try(times, machine.usable_cores)
    tried = f"; with 2 workers {gain.median:.1f} times as fast" if gain is not None else ""
    waits = f", {samples.sleep_fraction:.0%} of it waiting" if times.waits else ""
    factor, estimate = clear_factor(gain), partial(gain_of_workers, times, cores=machine.usable_cores)
    if factor is not None:  # of the two workers that were tried
        factor *= estimate(workers) / estimate(2)
    return Finding(
        name="no-workers",
        cause="Samples are made in the training process itself, and the step waits meanwhile.",
        evidence=f"num_workers=0, and a batch takes {samples.batch_s * 1e3:.1f} ms to make{waits}{tried}",
        remedy=f"num_workers={workers}",
        gain=factor,
        is_measured=factor is not None and workers == 2,
        is_uncertain=is_unclear(gain),
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
    if outweighs_step(measured) and (required(measured.as_is).wait_fraction or 0.0) < THRESHOLDS.stall_fraction:
        gain = None  # behind a step that other programs delay, no number of workers shows
    if not own.num_workers or own.is_iterable or not loading_matters(measured) or _is_refuted(gain):
        return None
    times, cores = _loop_times(measured), measured.machine.usable_cores
    workers = workers_to_try(times, cores, own.num_workers)
    if not times.waits or workers == own.num_workers or _take_turns(measured) or _lock_that_limits(measured):
        return None
    is_seen = measured.worker_activity is not None or not measured.machine.is_busy
    is_open = is_unclear(gain) or (gain is None and not is_seen)
    estimate = min(workers / own.num_workers, gain_of_workers(times, workers, cores))
    tried = f"; {describe_trial(measured, required(measured.trial(MORE_WORKERS)))}" if gain is not None else ""
    return Finding(
        name="too-few-workers",
        cause="Samples wait, for a disk, a network or a server, and more workers would wait side by side.",
        evidence=(
            f"{samples.sleep_fraction:.0%} of a sample's time is waiting, which needs no core; {own.num_workers} "
            f"worker{'s' * (own.num_workers > 1)}{tried}"
        ),
        remedy=f"num_workers={workers}, or penstock.DataLoader(..., num_workers='auto')",
        gain=None if is_open else estimate,
        is_uncertain=is_open,
    )


@cause("prefetches-little", "samples", "as_is")
def prefetches_little(measured: Measurements) -> Finding | None:
    """Workers could keep up by their mean, and too few batches are made ahead for those that take long."""
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    if own.prefetch_factor > 1 or own.num_workers < 2 or not samples.slow_indices or not loading_matters(measured):
        return None
    times = _loop_times(measured)
    mean_s = times.loop_s / gain_of_workers(times, own.num_workers, measured.machine.usable_cores)
    if (now.batch_s or 0.0) < THRESHOLDS.uneven_factor * mean_s:
        return None
    return Finding(
        name="prefetches-little",
        cause="A few samples take many times as long as the others, and hardly any batch is made ahead of them.",
        evidence=(
            f"a batch takes {(now.batch_s or 0.0) * 1e3:.1f} ms; by the mean of the samples, {own.num_workers} workers "
            f"would need {mean_s * 1e3:.1f} ms, but prefetch_factor=1, and the loop waits for each slow one"
        ),
        remedy="prefetch_factor=8, so that other batches are ready meanwhile",
    )


@cause("many-tensors", "samples", "transport_s")
def sends_many_tensors(measured: Measurements) -> Finding | None:
    """A batch is many small tensors, and a worker of torch's sends each of them for itself, in shared memory.

    Source: torch/multiprocessing/reductions.py, reduce_storage.
    """
    samples, own, parts = required(measured.samples), measured.settings, loading_parts_s(measured)
    if own.kind != "torch" or not own.start_method or not loading_matters(measured):
        return None
    is_many = samples.batch_tensors >= THRESHOLDS.many_tensors
    if not is_many or samples.batch_tensors_nbytes > THRESHOLDS.small_tensor_nbytes * samples.batch_tensors:
        return None
    if parts.get("transport", 0.0) < THRESHOLDS.costly_line_fraction * sum(parts.values()):
        return None
    gain = measured.gain_of(NO_WORKERS)
    pays = gain is not None and gain.pays()
    tried = f"; without workers {gain.median:.1f} times as fast" if gain is not None and pays else ""
    return Finding(
        name="many-tensors",
        cause="A batch is many small tensors, and a worker sends each of them for itself, in a file of shared memory.",
        evidence=(
            f"a batch of {samples.batch_samples} is {samples.batch_tensors} tensors, of "
            f"{size_text(samples.batch_tensors_nbytes)} together; transporting it takes "
            f"{required(transport_and_collate_s(measured)) * 1e3:.1f} ms, making it in one process "
            f"{samples.batch_s * 1e3:.1f} ms{tried}"
        ),
        remedy=(
            "merge them in collate_fn, in the worker, so that a batch is a few tensors: torch.cat with the lengths, "
            "torch.nn.utils.rnn.pad_sequence, or torch.stack" + "; or num_workers=0, as measured" * pays
        ),
        gain=clear_factor(gain) if pays else None,
        is_measured=pays,
    )


@cause("workers-cost-more", "samples", "transport_s")
def workers_cost_more(measured: Measurements) -> Finding | None:
    """Batches are so cheap that transporting them costs more than making them."""
    samples, own = required(measured.samples), measured.settings
    transport_s = required(transport_and_collate_s(measured))
    if not own.num_workers or not loading_matters(measured):
        return None
    gain = measured.gain_of(NO_WORKERS)
    has_paid = samples.batch_s < THRESHOLDS.inline_batch_s and gain is not None and gain.pays()
    if samples.batch_nbytes > THRESHOLDS.small_batch_nbytes or not (samples.batch_s <= transport_s or has_paid):
        return None
    if _is_refuted(gain):
        return None
    tried = f"; without workers {gain.median:.1f} times as fast" if gain is not None else ""
    return Finding(
        name="workers-cost-more",
        cause="A batch is so cheap that transporting it from a worker costs more than making it.",
        evidence=(
            f"making a batch of {samples.batch_samples} takes {samples.batch_s * 1e3:.2f} ms in one process, "
            f"transporting it from {own.num_workers} workers takes {transport_s * 1e3:.2f} ms{tried}"
        ),
        remedy="num_workers=0; or a larger batch_size, so that more samples share the cost",
        gain=clear_factor(gain),
        is_measured=clear_factor(gain) is not None,
        is_uncertain=is_unclear(gain),
    )


@cause("workers-do-not-scale", "samples")
def one_lock(measured: Measurements) -> Finding | None:
    """Samples hold a lock that all workers share."""
    lock = _lock_that_limits(measured)
    if measured.settings.num_workers < 2 or lock is None or not loading_matters(measured):
        return None
    return Finding(
        name="workers-do-not-scale",
        cause="Every sample holds a lock that all workers share, so they run one at a time.",
        evidence=(
            f"held for {lock.fraction:.0%} of a sample's time, with {measured.settings.num_workers} workers: "
            f"{lock.line}"
        ),
        remedy=(
            f"{place_of(lock.line)}: hold it only for what must not be done twice at the same time, or give each "
            "worker its own of what workers share"
        ),
    )


@cause("workers-do-not-scale", "samples", "as_is")
def workers_do_not_scale(measured: Measurements) -> Finding | None:
    """Several workers are no faster than one process."""
    samples, own, now = required(measured.samples), measured.settings, required(measured.as_is)
    gain = measured.gain_of(MORE_WORKERS)
    if own.num_workers < 2 or now.batch_s is None or not loading_matters(measured):
        return None
    if not _take_turns(measured) and (measured.machine.is_busy or not _compute_in_turns(measured, gain)):
        return None
    activity = measured.worker_activity
    tried = f"; {describe_trial(measured, required(measured.trial(MORE_WORKERS)))}" if gain is not None else ""
    used = f", and no worker uses more than {activity.cores:.1f} cores" if activity is not None else ""
    return Finding(
        name="workers-do-not-scale",
        cause="Several workers are hardly faster than one: they wait for each other, or for something that they share.",
        evidence=(
            f"one process makes a batch in {samples.batch_s * 1e3:.1f} ms, {own.num_workers} workers together need "
            f"{now.batch_s * 1e3:.1f} ms{tried}{used}"
        ),
        remedy=(
            "look for what workers share, and give each its own (a lock, a connection, a server that answers one "
            f"request at a time){_longest_line(samples.lines)}"
        ),
    )


def _lock_that_limits(measured: Measurements) -> SharedLock | None:
    """Return the lock that lets fewer workers run side by side than there are; None without one."""
    lock = required(measured.samples).shared_lock
    if lock is None or lock.fraction < THRESHOLDS.line_fraction:
        return None
    return lock if lock.fraction * measured.settings.num_workers >= THRESHOLDS.locked_workers else None


def _take_turns(measured: Measurements) -> bool:
    """Return whether samples wait, and the workers that there are do not wait side by side."""
    if measured.machine.is_busy:
        return _sleep_for_each_other(measured)
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    times = _loop_times(measured)
    if not times.waits or not now.batch_s or own.num_workers < 2 or own.is_iterable:
        return False
    side_by_side_s = times.loop_s / gain_of_workers(times, own.num_workers, measured.machine.usable_cores)
    others_s = (transport_and_collate_s(measured) or 0.0) + (now.step_s or 0.0)
    slowest_s = max(side_by_side_s, samples.batch_s / own.num_workers)
    return now.batch_s > THRESHOLDS.serial_factor * (slowest_s + others_s) and not samples.slow_indices


def _sleep_for_each_other(measured: Measurements) -> bool:
    """Return whether every worker sleeps for most of its time, and far longer than its samples do.

    That holds on a busy machine, too, where a worker that computes is not asleep while it waits for a processor.
    """
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    activity = measured.worker_activity
    if activity is None or own.num_workers < 2 or own.is_iterable or samples.slow_indices:
        return False
    if samples.batch_s < THRESHOLDS.inline_batch_s:  # they sleep because there is hardly anything to do
        return False
    if (now.wait_fraction or 0.0) < THRESHOLDS.busy_workers or activity.asleep_fraction < THRESHOLDS.asleep_fraction:
        return False  # workers that are ahead of the loop sleep as well
    asleep_s = activity.asleep_fraction * own.num_workers * (now.batch_s or 0.0)
    own_s = samples.sleep_fraction * samples.batch_s + (transport_and_collate_s(measured) or 0.0)
    return asleep_s > THRESHOLDS.serial_factor * own_s


def _compute_in_turns(measured: Measurements, gain: Gain | None) -> bool:
    """Return whether workers need as long as one process, asleep while the loop waits, and more of them do not help."""
    own, samples, now = measured.settings, required(measured.samples), required(measured.as_is)
    is_clear = gain is not None and gain.is_clear
    if gain is not None and is_clear and gain.median > THRESHOLDS.worthwhile_gain:
        return False
    transport_s = transport_and_collate_s(measured) or 0.0
    if own.num_workers > measured.machine.usable_cores or transport_s > THRESHOLDS.transport_fraction * samples.batch_s:
        return False
    if (now.batch_s or 0.0) < THRESHOLDS.unscaled_speedup * samples.batch_s:
        return False
    activity, waits = measured.worker_activity, now.wait_fraction or 0.0
    if activity is None:
        return is_clear
    # Workers that are ahead of the loop sleep while it computes; those that wait for each other, while it waits.
    asleep = activity.asleep_fraction - (1 - waits)
    return asleep >= THRESHOLDS.asleep_fraction * waits


def _longest_line(lines: tuple[HotLine, ...]) -> str:
    return f"; most of a sample's time passes in {describe_line(lines[0])}" if lines else ""


def _is_refuted(gain: Gain | None) -> bool:
    """Return whether a trial of the change showed that it gains too little."""
    return gain is not None and (gain.is_loss or (gain.is_clear and gain.median < THRESHOLDS.worthwhile_gain))


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
        if not loading_matters(measured) or _best_trial(measured) != self.trial:
            return None
        covers = waiting_samples if measured.settings.num_workers else no_workers  # they know how many more
        if self.trial == MORE_WORKERS and measured.samples is not None and covers.find(measured) is not None:
            return None
        trial, gain = required(measured.trial(self.trial)), required(measured.gain_of(self.trial))
        parts = loading_parts_s(measured)
        has_transport = self.trial == PENSTOCK and "transport" in parts
        transport = f"; transport takes {parts['transport'] * 1e3:.1f} ms per batch" if has_transport else ""
        return Finding(
            name=self.name,
            cause=self.cause,
            evidence=f"{describe_trial(measured, trial)}{transport}",
            remedy=trial.line,
            gain=gain.median,
            is_measured=True,
            is_uncertain=_may_be_chance(self.trial, gain, measured),
        )


_BY_NUMBER = (MORE_WORKERS, THREADS, PROCESSES, NO_WORKERS, FEWER_WORKERS)


def _may_be_chance(trial: str, gain: Gain, measured: Measurements) -> bool:
    """Return whether a loop may have gained only processors from other programs, which a quiet machine has not.

    Its steps did if it gained more than it waits. By number, more processes do; but samples that wait gain from more
    workers on any machine, and so do a few workers that leave cores unused.
    """
    samples, own, now = measured.samples, measured.settings, required(measured.as_is)
    if not measured.machine.is_busy:
        return False
    if gain.median * (1 - (now.wait_fraction or 0.0)) > THRESHOLDS.worthwhile_gain:
        return True
    if trial not in _BY_NUMBER or samples is None or samples.sleep_fraction > THRESHOLDS.waiting_fraction:
        return False
    return not own.num_workers or own.num_workers + 2 > measured.machine.usable_cores


BETTER_SETTINGS = (
    BetterSetting("too-few-workers", MORE_WORKERS, "More workers would load faster."),
    BetterSetting("penstock-faster", PENSTOCK, "penstock's DataLoader loads the same batches faster."),
    BetterSetting("threads-faster", THREADS, "Threads instead of processes would load faster."),
    BetterSetting(
        "threads-hold-the-gil", PROCESSES, "Samples hold Python's global lock, so processes load faster than threads."
    ),
    BetterSetting("workers-cost-more", NO_WORKERS, "Loading is faster without workers."),
    BetterSetting("too-many-workers", FEWER_WORKERS, "Loading is faster with fewer workers."),
)


def _best_trial(measured: Measurements) -> str | None:
    gains = {
        setting.trial: gain.median
        for setting in BETTER_SETTINGS
        if (gain := measured.gain_of(setting.trial)) is not None and gain.pays()
    }
    # Without any worker, the finding "no-workers" already covers more of them, and how many.
    if not gains or (not measured.settings.num_workers and set(gains) == {MORE_WORKERS}):
        return None
    return max(gains, key=lambda name: gains[name])
