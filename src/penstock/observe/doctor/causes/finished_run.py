"""Findings about a finished run: from its loaders' statistics, and its memory over time.

A run shows less than the doctor's measurements: nothing was tried, so every gain is an estimate, from the time that
loops waited.
"""

from __future__ import annotations

import shlex

from penstock.core.units import size_text
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes.bottleneck import MEANING
from penstock.observe.doctor.causes.epochs import is_recreated, iterator_begun_anew, order_that_repeats
from penstock.observe.doctor.worker_estimate import LoopTimes, fitting_workers, gain_of_workers, workers_to_try
from penstock.observe.record import rates
from penstock.observe.record.finding import Finding
from penstock.observe.record.formatting import percent_text, time_text
from penstock.observe.record.group_loaders import group_loaders, iterator_text
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.straggler import find_straggler
from penstock.observe.record.time_parts import Waiting, cause_of_waiting, most_waited_for

_RUN_ESTIMATE_STALL = 0.9
"""Of the loop's time: beyond it an estimate is the quotient of the loop and a step that takes about nothing."""
_RUN_WAIT_S = 1.0
"""Seconds: nobody changes a script for less."""
_RUN_WAIT_FRACTION = 0.25
"""Of the loop's time: in a run of a few seconds this stands in for the absolute wait."""
_RUN_GROWTH_NBYTES = 256 << 20
"""Bytes: caches of Python, torch and the allocator grow by less."""
_RUN_GROWTH_FRACTION = 0.2
"""Of the earlier memory: for large programs, the same limit relative to their size."""
_RUN_GROWTH_POINTS = 9
"""Points of the timeline: three per third; with fewer one outlier decides."""

_SHOWN_INDICES = 8
_COMMAND_LENGTH = 60


def findings_of_run(record: RunRecord) -> tuple[Finding, ...]:
    """Return what follows from a run's record, the most expensive first; empty where nothing needs to be changed.

    >>> findings_of_run(RunRecord(command=("train.py",), started="", wall_s=1.0))
    ()
    """
    used = group_loaders(record.loaders)
    if not used:
        return ()
    longest = max(used, key=lambda loader: loader.statistics.loop_s)
    found = [
        _straggler(record),
        *map(_iterator_recreated, used),
        _waiting(most_waited_for(used), record),
        _too_many_workers(longest, record),
        _batches_held(longest),
        _worker_crashes(longest),
        _skipped_samples(longest),
        *map(_same_order, used),
        _memory_growth(record),
    ]
    return tuple(finding for finding in found if finding is not None)


def _straggler(record: RunRecord) -> Finding | None:
    """A rank whose loader the other ranks waited for."""
    found = find_straggler(record.ranks, thresholds.RUN_STALL_FRACTION)
    if found is None:
        return None
    names = ", ".join(map(str, found.ranks[:_SHOWN_INDICES])) + (", ..." if found.ranks[_SHOWN_INDICES:] else "")
    slow = f"rank {names}" if len(found.ranks) == 1 else f"ranks {names}"
    return Finding(
        name="straggler",
        cause=f"The loader of {slow} holds up the other ranks: they wait for it in their next collective.",
        evidence=(
            f"{slow} waited for data {percent_text(found.stall_fraction)} of the time, the others "
            f"{percent_text(found.others_fraction)}; a batch came {time_text(found.longer_s)} later than on others, "
            "whose steps took longer by about that"
        ),
        remedy=(
            "compare that machine's storage and its free cores, and the size of that rank's samples, with the others'; "
            "`penstock doctor` shows which part of its loading takes the time"
        ),
        gain=rates.gain_without(found.lost_fraction),
    )


def _iterator_recreated(loader: LoaderRecord) -> Finding | None:
    """`next(iter(loader))` in a loop, which begins an epoch for each batch."""
    counted = loader.statistics
    if not is_recreated(counted.epochs, counted.batches, counted.length):
        return None
    started = f"; workers started and stopped for {time_text(counted.stages.workers_s)}" if counted.workers else ""
    return iterator_begun_anew(
        "iterator",
        f"{loader.label}: {counted.epochs} iterators for {counted.batches} batches{started}",
        has_workers=counted.worker_type != "inline",
        loader=loader.label,
    )


def _waiting(loader: LoaderRecord, record: RunRecord) -> Finding | None:
    """What the step waited for, if it is worth a change."""
    counted = loader.statistics
    least_s = min(_RUN_WAIT_S, _RUN_WAIT_FRACTION * counted.loop_s)
    if counted.stall_fraction < thresholds.RUN_STALL_FRACTION or counted.loading_s < least_s:
        return None
    if is_recreated(counted.epochs, counted.batches, counted.length):
        return None  # a finding of its own; nothing else is known of the time that it takes
    match cause_of_waiting(loader):
        case "start":
            return _start_up(loader)
        case "unknown":
            return Finding(
                name="unknown",
                cause="The step waits for a loader that is not penstock's.",
                evidence=f"{_waited_text(loader)} ({iterator_text(loader)})",
                remedy=f"`{_doctor_command(record)}` shows which part of loading takes the time",
            )
        case stage:
            return _bottleneck(loader, record, stage)


def _waited_text(loader: LoaderRecord) -> str:
    counted = loader.statistics
    share = percent_text(counted.stall_fraction)
    return f"{loader.label}: the step waited for data {share} of {time_text(counted.loop_s)} of loops"


def _start_up(loader: LoaderRecord) -> Finding | None:
    """Workers that start again and again; nothing where they start once: more of them would start no sooner."""
    counted = loader.statistics
    if counted.worker_type != "process" or loader.settings.get("persistent_workers") or counted.epochs < 2:
        return None
    startup_s = counted.first_batch_s * (counted.epochs - 1)
    lost = min(counted.stall_fraction, startup_s / counted.loop_s)
    return Finding(
        name="short-epochs",
        cause="Workers are started again for every epoch, and an epoch is short.",
        evidence=(
            f"{_waited_text(loader)}, and the first batch of an epoch came after {time_text(counted.first_batch_s)}, "
            f"{counted.epochs} times"
        ),
        remedy="persistent_workers=True, and make the loader once, before the first epoch",
        gain=rates.gain_without(lost) if lost <= _RUN_ESTIMATE_STALL else None,
        loader=loader.label,
    )


def _bottleneck(loader: LoaderRecord, record: RunRecord, stage: Waiting) -> Finding:
    counted, stages = loader.statistics, loader.statistics.stages
    workers = f"{counted.workers} worker{'s' * (counted.workers > 1)}"
    where = "this process" if counted.worker_type == "inline" else workers
    times = LoopTimes.of(counted)
    slept = f" ({percent_text(times.waiting_fraction)} of it waiting, for a disk or a network)" if times.waits else ""
    evidence = (
        f"{_waited_text(loader)}; making samples took {time_text(stages.fetch_s)} in {where}{slept}, collate "
        f"{time_text(stages.collate_s)}, transport {time_text(stages.transport_s)}"
    )
    part = ("waiting" if times.waits else "samples") if stage == "fetch" else stage
    name, cause = f"{part}-bound", f"Most of the loading time is spent {MEANING[part]}."
    if counted.worker_type == "inline" and stage == "fetch" and record.cpus > 1:
        name, cause = "no-workers", "Samples are made in the training process itself, and the step waits meanwhile."
    elif counted.worker_type == "inline" and stage == "transport":
        cause = "Samples cost nothing, and the step waits for them to be put together."
    gain = _gain_of_workers(loader, record) if stage == "fetch" else 1.0
    return Finding(
        name=name,
        cause=cause,
        evidence=evidence,
        remedy=_remedy(stage, loader, record),
        gain=gain if gain > 1.0 else None,
        loader=loader.label,
    )


def _gain_of_workers(loader: LoaderRecord, record: RunRecord) -> float:
    """Return how much faster the loop would be if the workers to try shared what made it wait."""
    counted, workers = loader.statistics, _more_workers(loader, record)
    most = rates.gain_without(counted.stall_fraction)
    if counted.worker_type != "inline":
        most = min(most, workers / counted.workers)
    return min(most, gain_of_workers(LoopTimes.of(counted), workers, record.cpus))


def _more_workers(loader: LoaderRecord, record: RunRecord) -> int:
    """Return how many workers to try for a loop that waits for its samples: the present ones, if no more can gain."""
    counted = loader.statistics
    if counted.worker_type == "inline":
        return workers_to_try(LoopTimes.of(counted), record.cpus) if record.cpus > 1 else 0
    if counted.workers_reason.startswith("auto"):  # it has tried others
        return counted.workers
    return workers_to_try(LoopTimes.of(counted), record.cpus, counted.workers)


def _remedy(stage: Waiting, loader: LoaderRecord, record: RunRecord) -> str:
    counted = loader.statistics
    doctor = f"`{_doctor_command(record)}` shows which part of it"
    if stage == "collate":
        return f"return tensors or arrays of one shape from __getitem__, so that they can be stacked; {doctor}"
    if stage == "transport":
        inline_s = counted.stages.fetch_s + counted.stages.collate_s
        is_cheaper_inline = counted.worker_type == "process" and inline_s < counted.stall_fraction * counted.loop_s
        larger = "num_workers=0, or a larger batch_size" if is_cheaper_inline else "a larger batch_size"
        return larger if counted.worker_type in ("process", "inline") else doctor
    present = 0 if counted.worker_type == "inline" else counted.workers
    waits, workers = LoopTimes.of(counted).waits, _more_workers(loader, record)
    if workers > present:
        beyond = " (they need no core while they wait, unless they wait for each other)" if waits else ""
        other = f", or make {'what they wait for quicker' if waits else 'samples cheaper'}; {doctor}" if present else ""
        return f"num_workers={workers}{beyond}{other}"
    if waits:
        return f"make what samples wait for quicker; {doctor}"
    full = f" (each of the {record.cpus} cores has a worker)" if present >= record.cpus else ""
    return f"make samples cheaper{full}; {doctor}"


def _doctor_command(record: RunRecord) -> str:
    """Return how the doctor is asked about the program that ran, with as many of its arguments as fit."""
    whole = shlex.join(("penstock", "doctor", *record.command))
    if len(whole) <= _COMMAND_LENGTH:
        return whole
    named = 2 if record.command[0] == "-m" else 1
    return shlex.join(("penstock", "doctor", *record.command[:named])) + " ..."


def _too_many_workers(loader: LoaderRecord, record: RunRecord) -> Finding | None:
    counted = loader.statistics
    if counted.worker_type != "process" or counted.workers < max(record.cpus + 2, 2 * record.cpus):
        return None
    if counted.workers_reason.startswith("auto") or LoopTimes.of(counted).waits:
        return None
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores: they share the cores, and each takes memory.",
        evidence=f"{loader.label}: {counted.workers} workers, {record.cpus} cores",
        remedy=f"num_workers={fitting_workers(record.cpus)}",
    )


def _batches_held(loader: LoaderRecord) -> Finding | None:
    ring = loader.statistics.ring
    if not ring.copied_out:
        return None
    return Finding(
        name="batches-held",
        cause="The program kept more batches than the ring has room for, and they were copied.",
        evidence=f"{loader.label}: {ring.copied_out} batches copied out of {size_text(ring.budget_nbytes)} of slots",
        remedy=f"release batches earlier (`del batch`), or ring_bytes={2 * ring.budget_nbytes}",
    )


def _worker_crashes(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    if not counted.restarts:
        return None
    quarantined = ", ".join(map(str, counted.quarantined[:_SHOWN_INDICES]))
    return Finding(
        name="workers-crashed",
        cause="Worker processes crashed and were replaced.",
        evidence=(
            f"{loader.label}: {counted.restarts} crashes" + (f"; at samples {quarantined}" if quarantined else "")
        ),
        remedy="check those samples, or the memory that workers take (a kernel that is out of memory kills them)",
    )


def _skipped_samples(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    if not counted.skipped:
        return None
    shown = ", ".join(map(str, counted.skipped_indices[:_SHOWN_INDICES]))
    return Finding(
        name="samples-skipped",
        cause="Samples that raised an exception were skipped or replaced.",
        evidence=f"{loader.label}: {counted.skipped} of {counted.samples + counted.skipped}, as in dataset[{shown}]",
        remedy="fix them, or remove them from the dataset",
    )


def _same_order(loader: LoaderRecord) -> Finding | None:
    """A sampler that shuffles has drawn one order for all epochs, as a DistributedSampler does without set_epoch."""
    counted = loader.statistics
    ends = [one.digest for one in counted.index_digests if one.is_end and one.start == 0]
    few = counted.samples < thresholds.SHUFFLED_SAMPLES * max(1, counted.epochs)
    if not loader.shuffled_by or few or len(ends) < 2 or len(set(ends)) > 1:
        return None
    passes = f"{len(ends)} passes over {loader.label}, by a {loader.shuffled_by}, all have the digest {ends[0]}"
    return order_that_repeats(loader.shuffled_by, passes, loader=loader.label)


def _memory_growth(record: RunRecord) -> Finding | None:
    """Host memory that grows from the middle third of a run to the last, without the ring's slots.

    The first third does not count: there, workers start and caches fill.
    """
    points = [point for point in record.timeline if point.host_nbytes is not None and point.batches]
    if len(points) < _RUN_GROWTH_POINTS:
        return None
    third = len(points) // 3
    thirds = [points[third : 2 * third], points[-third:]]
    sizes = [sum((one.host_nbytes or 0) - one.slots_nbytes for one in part) // third for part in thirds]
    samples = thirds[1][0].samples - thirds[0][0].samples
    grown = sizes[1] - sizes[0]
    least = max(_RUN_GROWTH_NBYTES, _RUN_GROWTH_FRACTION * sizes[0])
    if grown < least or not samples:
        return None
    return Finding(
        name="memory-grows",
        cause="Host memory kept growing.",
        evidence=(
            f"from {size_text(sizes[0])} in the middle third of the run to {size_text(sizes[1])} in the last, "
            f"{size_text(grown // samples)} per sample"
        ),
        remedy=(
            "a dataset of many Python objects is copied into every worker by reading it (penstock.shared keeps one), "
            "and a cache in the dataset grows in every worker; `penstock doctor` shows which of the two it is"
        ),
    )
