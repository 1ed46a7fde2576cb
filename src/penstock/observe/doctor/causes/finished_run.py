"""Findings about a finished run: from its loaders' statistics, and its memory over time.

A run shows less than the doctor's measurements: nothing was tried, so every gain is an estimate, from the time that
loops waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.units import size_text
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record import rates
from penstock.observe.record.finding import Finding
from penstock.observe.record.group_loaders import iterator_text
from penstock.observe.record.run_record import LoaderRecord, RunRecord

_SHOWN_INDICES = 8


def findings_of_run(record: RunRecord) -> tuple[Finding, ...]:
    """Return what follows from a run's record, the most expensive first; empty where nothing needs to be changed.

    >>> findings_of_run(RunRecord(command=("train.py",), started="", wall_s=1.0))
    ()
    """
    used = [loader for loader in record.loaders if loader.statistics.batches]
    if not used:
        return ()
    longest = max(_merge_alike(used), key=lambda loader: rates.loop_s(loader.statistics))
    found = [
        _start_up(longest) or _bottleneck(longest, record),
        _too_many_workers(longest, record),
        _batches_held(longest),
        _worker_crashes(longest),
        _skipped_samples(longest),
        _memory_growth(record),
    ]
    return tuple(finding for finding in found if finding is not None)


def _merge_alike(loaders: Sequence[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders; those that a program created again and again (for every epoch, say) are merged into one."""
    groups: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        key = f"{loader.name.partition(' #')[0]} {loader.made_at}: {loader.statistics.length}, {dict(loader.settings)}"
        groups.setdefault(key, []).append(loader)
    return [
        replace(group[0], statistics=rates.combine_statistics([one.statistics for one in group]))
        for group in groups.values()
    ]


def _waits(loader: LoaderRecord) -> bool:
    counted = loader.statistics
    least_s = min(THRESHOLDS.run_wait_s, THRESHOLDS.run_wait_fraction * rates.loop_s(counted))
    return rates.stall_fraction(counted) >= THRESHOLDS.run_stall_fraction and rates.loading_s(counted) >= least_s


def _gain(loader: LoaderRecord, most: float = 100.0) -> float:
    """Return how much faster the loop would be if it never waited, but no more than `most`."""
    return min(most, 1 / max(0.01, 1 - rates.stall_fraction(loader.statistics)))


def _start_up(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    epochs = max(1, counted.epochs)
    startup_s = counted.first_batch_s * epochs
    loop_s = rates.loop_s(counted)
    if counted.worker_type != "process" or loader.settings.get("persistent_workers") or epochs < 2:
        return None
    if not _waits(loader) or startup_s < THRESHOLDS.run_startup_fraction * loop_s:
        return None
    return Finding(
        name="short-epochs",
        cause="Workers are started again for every epoch, and an epoch is short.",
        evidence=(
            f"the first batch of an epoch came after {counted.first_batch_s * 1e3:.0f} ms, {epochs} times, in loops of "
            f"{loop_s:.1f} s"
        ),
        remedy="persistent_workers=True",
        gain=_gain(loader),
    )


def _bottleneck(loader: LoaderRecord, record: RunRecord) -> Finding | None:
    if not _waits(loader):
        return None
    counted, stages = loader.statistics, loader.statistics.stages
    if loader.is_watched:
        return Finding(
            name="loading-bound",
            cause="The step waits for a loader that is not penstock's.",
            evidence=(
                f"{loader.label}: the loop waited {rates.stall_fraction(counted):.0%} of {rates.loop_s(counted):.1f} s "
                f"({iterator_text(loader)})"
            ),
            remedy="`penstock doctor module:function` shows which part of loading takes the time",
        )
    workers = max(1, min(counted.workers, record.cpus)) if counted.worker_type != "inline" else 1
    parts = {
        "dataset": stages.fetch_s / workers,
        "collate": stages.collate_s / workers,
        "transport": stages.transport_s,
    }
    largest = max(parts, key=lambda part: parts[part])
    waited = rates.stall_fraction(counted)
    where = "this process" if counted.worker_type == "inline" else f"{counted.workers} workers"
    evidence = (
        f"{loader.label}: the loop waited {waited:.0%} of {rates.loop_s(counted):.1f} s; making samples took "
        f"{stages.fetch_s:.1f} s in {where}, collate {stages.collate_s:.1f} s, transport {stages.transport_s:.1f} s"
    )
    causes = {
        "dataset": ("loading-bound", "The step waits for samples to be read, decoded and transformed."),
        "collate": ("collate-bound", "The step waits for samples to be collated into batches."),
        "transport": ("transport-bound", "The step waits for batches to be transported from the workers."),
    }
    name, cause = causes[largest]
    if counted.worker_type == "inline" and largest == "dataset" and record.cpus > 1:
        name, cause = "no-workers", "Samples are made in the training process itself, and the step waits meanwhile."
    more = _more_workers(loader, record) / max(1, counted.workers)
    return Finding(
        name=name,
        cause=cause,
        evidence=evidence,
        remedy=_remedy(largest, loader, record),
        gain=_gain(loader, more) if largest == "dataset" and more > 1 else None,
    )


def _more_workers(loader: LoaderRecord, record: RunRecord) -> int:
    """Return how many workers to try for a loop that waits for its samples: two more, but no more than cores."""
    if loader.statistics.worker_type == "inline":
        return max(1, min(4, record.cpus - 1))
    return max(loader.statistics.workers, min(record.cpus, loader.statistics.workers + 2))


def _remedy(part: str, loader: LoaderRecord, record: RunRecord) -> str:
    counted = loader.statistics
    doctor = "`penstock doctor module:function` shows which part of it"
    if part == "collate":
        return f"return tensors or arrays of one shape from __getitem__, so that they can be stacked; {doctor}"
    if part == "transport":
        return "num_workers=0, or a larger batch_size" if counted.worker_type == "process" else doctor
    if counted.worker_type == "inline":
        return f"num_workers={_more_workers(loader, record)}" if record.cpus > 1 else f"make samples cheaper; {doctor}"
    if counted.workers < record.cpus:
        return f"num_workers={_more_workers(loader, record)}, or make samples cheaper; {doctor}"
    return f"make samples cheaper (all {record.cpus} cores have a worker); {doctor}"


def _too_many_workers(loader: LoaderRecord, record: RunRecord) -> Finding | None:
    counted = loader.statistics
    if counted.worker_type != "process" or counted.workers < max(record.cpus + 2, 2 * record.cpus):
        return None
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores: they share the cores, and each takes memory.",
        evidence=f"{loader.label}: {counted.workers} workers, {record.cpus} cores",
        remedy=f"num_workers={max(1, record.cpus - 1)}, unless samples wait for a network",
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


def _memory_growth(record: RunRecord) -> Finding | None:
    """Host memory that grows from the middle third of a run to the last, without the ring's slots.

    The first third does not count: there, workers start and caches fill.
    """
    points = [point for point in record.timeline if point.host_nbytes is not None and point.batches]
    if len(points) < THRESHOLDS.run_growth_points:
        return None
    third = len(points) // 3
    thirds = [points[third : 2 * third], points[-third:]]
    sizes = [sum((one.host_nbytes or 0) - one.slots_nbytes for one in part) // third for part in thirds]
    samples = thirds[1][0].samples - thirds[0][0].samples
    grown = sizes[1] - sizes[0]
    least = max(THRESHOLDS.run_growth_nbytes, THRESHOLDS.run_growth_fraction * sizes[0])
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
            "a dataset of many Python objects is copied into every worker by reading it (keep them in one array), and "
            "a cache in the dataset grows in every worker; `penstock doctor` shows which of the two it is"
        ),
    )
