"""Findings about a run that is over: from what its loaders counted, and what was seen over time.

A run tells less than an examination: nothing was tried, so every gain is an estimate, from the time that loops waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.units import size_text
from penstock.observe import rates
from penstock.observe.finding import Finding
from penstock.observe.record import LoaderRecord, RunRecord

_WAITS = 0.1
_LEAST_S = 1.0
_GROWTH_NBYTES = 256 << 20


def findings_of_run(record: RunRecord) -> tuple[Finding, ...]:
    """Return what a run's record says, what costs most first; empty where nothing is to be changed.

    >>> findings_of_run(RunRecord(command=("train.py",), started="", wall_s=1.0))
    ()
    """
    used = [loader for loader in record.loaders if loader.statistics.batches]
    if not used:
        return ()
    longest = max(_alike(used), key=lambda loader: rates.loop_s(loader.statistics))
    found = [
        _start_up(longest) or _bottleneck(longest, record),
        _too_many_workers(longest, record),
        _held(longest),
        _deaths(longest),
        _skipped(longest),
        _growing(record),
    ]
    return tuple(finding for finding in found if finding is not None)


def _alike(loaders: Sequence[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders, those that a program made anew again and again (for every epoch, say) as one."""
    groups: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        key = f"{loader.name.partition(' #')[0]}: {loader.statistics.length}, {dict(loader.settings)}"
        groups.setdefault(key, []).append(loader)
    return [
        replace(group[0], statistics=rates.together([one.statistics for one in group])) for group in groups.values()
    ]


def _waits(loader: LoaderRecord) -> bool:
    counted = loader.statistics
    return rates.waited_share(counted) >= _WAITS and rates.loading_s(counted) >= min(
        _LEAST_S, rates.loop_s(counted) / 4
    )


def _gain(loader: LoaderRecord, most: float = 100.0) -> float:
    """Return how much faster the loop were if it never waited, and no more than `most`."""
    return min(most, 1 / max(0.01, 1 - rates.waited_share(loader.statistics)))


def _start_up(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    epochs = max(1, counted.epochs)
    startup_s = counted.first_batch_s * epochs
    loop_s = rates.loop_s(counted)
    if counted.body != "process" or loader.settings.get("persistent_workers") or epochs < 2:
        return None
    if not _waits(loader) or startup_s < 0.3 * loop_s:
        return None
    return Finding(
        name="short-epochs",
        cause="Workers are started anew for every epoch, and an epoch is short.",
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
    workers = max(1, min(counted.workers, record.cpus)) if counted.body != "inline" else 1
    parts = {
        "dataset": stages.fetch_s / workers,
        "collate": stages.collate_s / workers,
        "transport": stages.transport_s,
    }
    largest = max(parts, key=lambda part: parts[part])
    waited = rates.waited_share(counted)
    evidence = (
        f"{loader.name}: the loop waited {waited:.0%} of {rates.loop_s(counted):.1f} s; making samples took "
        f"{stages.fetch_s:.1f} s in {'this process' if counted.body == 'inline' else f'{counted.workers} workers'}, "
        f"collating {stages.collate_s:.1f} s, handing over {stages.transport_s:.1f} s"
    )
    causes = {
        "dataset": ("loading-bound", "The step waits for samples to be read, decoded and transformed."),
        "collate": ("collate-bound", "The step waits for samples to be put together to batches."),
        "transport": ("transport-bound", "The step waits for batches to be handed over."),
    }
    name, cause = causes[largest]
    if counted.body == "inline" and largest == "dataset" and record.cpus > 1:
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
    """Return how many workers a loop that waits for its samples should try: two more, within the cores."""
    if loader.statistics.body == "inline":
        return max(1, min(4, record.cpus - 1))
    return max(loader.statistics.workers, min(record.cpus, loader.statistics.workers + 2))


def _remedy(part: str, loader: LoaderRecord, record: RunRecord) -> str:
    counted = loader.statistics
    look = "`penstock doctor module:function` says which part of it"
    if part == "collate":
        return f"return tensors or arrays of one shape from __getitem__, so that they can be stacked; {look}"
    if part == "transport":
        return "num_workers=0, or a larger batch_size" if counted.body == "process" else look
    if counted.body == "inline":
        return f"num_workers={_more_workers(loader, record)}" if record.cpus > 1 else f"make samples cheaper; {look}"
    if counted.workers < record.cpus:
        return f"num_workers={_more_workers(loader, record)}, or make samples cheaper; {look}"
    return f"make samples cheaper (all {record.cpus} cores have a worker); {look}"


def _too_many_workers(loader: LoaderRecord, record: RunRecord) -> Finding | None:
    counted = loader.statistics
    if counted.body != "process" or counted.workers < max(record.cpus + 2, 2 * record.cpus):
        return None
    return Finding(
        name="too-many-workers",
        cause="There are more workers than cores: they take turns, and each holds memory.",
        evidence=f"{loader.name}: {counted.workers} workers, {record.cpus} cores",
        remedy=f"num_workers={max(1, record.cpus - 1)}, unless samples wait for a network",
    )


def _held(loader: LoaderRecord) -> Finding | None:
    ring = loader.statistics.ring
    if not ring.copied_out:
        return None
    return Finding(
        name="batches-held",
        cause="The program kept more batches than the ring has room for, and they were copied.",
        evidence=f"{loader.name}: {ring.copied_out} batches copied out of {size_text(ring.budget_nbytes)} of slots",
        remedy=f"let go of batches (`del batch`), or ring_bytes={2 * ring.budget_nbytes}",
    )


def _deaths(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    if not counted.restarts:
        return None
    killers = ", ".join(map(str, counted.quarantined[:8]))
    return Finding(
        name="workers-died",
        cause="Worker processes died and were replaced.",
        evidence=f"{loader.name}: {counted.restarts} deaths" + (f"; by samples {killers}" if killers else ""),
        remedy=(
            "look at those samples, or at the memory that workers may take (a kernel that is out of memory kills them)"
        ),
    )


def _skipped(loader: LoaderRecord) -> Finding | None:
    counted = loader.statistics
    if not counted.skipped:
        return None
    shown = ", ".join(map(str, counted.skipped_indices[:8]))
    return Finding(
        name="samples-skipped",
        cause="Samples that raised were left out or replaced.",
        evidence=f"{loader.name}: {counted.skipped} of {counted.samples + counted.skipped}, as in dataset[{shown}]",
        remedy="mend them, or take them out of the dataset",
    )


def _growing(record: RunRecord) -> Finding | None:
    """Host memory that grows from the first third of a run to the last, without slots growing."""
    seen = [moment for moment in record.timeline if moment.host_nbytes is not None and moment.batches]
    if len(seen) < 9:
        return None
    third = len(seen) // 3
    thirds = [seen[third : 2 * third], seen[-third:]]
    sizes = [sum((one.host_nbytes or 0) - one.slots_nbytes for one in part) // third for part in thirds]
    samples = thirds[1][0].samples - thirds[0][0].samples
    grown = sizes[1] - sizes[0]
    if grown < max(_GROWTH_NBYTES, sizes[0] // 5) or not samples:
        return None
    return Finding(
        name="memory-grows",
        cause="Host memory grew all the time.",
        evidence=(
            f"from {size_text(sizes[0])} in the middle third of the run to {size_text(sizes[1])} in the last, "
            f"{size_text(grown // samples)} per sample"
        ),
        remedy=(
            "a dataset of many Python objects is copied into every worker by reading it (keep them in one array), and "
            "so is a cache in the dataset; `penstock doctor` tells which"
        ),
    )
