"""The report that `penstock run` prints at the end: a `RunRecord` as text. Data in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.core.units import size_text
from penstock.observe.record import rates
from penstock.observe.record.formatting import rate_text
from penstock.observe.record.group_loaders import group_loaders, group_uncounted, iterator_text, settings_text
from penstock.observe.record.rank_record import RankRecord
from penstock.observe.record.run_record import LoaderRecord, RunRecord

_STAGES = (
    ("read+decode", "fetch_s", "in the dataset, summed over workers"),
    ("collate", "collate_s", "samples into a batch, summed over workers"),
    ("transport", "transport_s", "dispatching tasks, receiving batches"),
    ("wait", "wait_s", "the step waited for data"),
    ("step", "step_s", "the program's own work between batches"),
)


def render(record: RunRecord) -> str:
    """Return the report of `record` as lines of plain text."""
    code = "unknown" if record.exit_code is None else record.exit_code
    lines = [f"penstock: {' '.join(record.command)} ran {record.wall_s:.1f} s, exit code {code}"]
    if record.error:
        lines.append(f"  ended by {record.error}")
    used, uncounted = group_loaders(record.loaders), group_uncounted(record.loaders)
    if not used and not uncounted:
        lines.append("  no batch was loaded through a DataLoader")
    for loader in used:
        lines += _loader_lines(loader)
    lines += [f"  {loader.label}: {iterator_text(loader)}; its batches were not counted" for loader in uncounted]
    if len(used) > 1:
        lines += _total_lines(used)
    lines += _rank_lines(record.ranks)
    if record.baseline is not None:
        lines.append(record.baseline.render())
    memory = record.memory
    peak = memory.peak_pss_nbytes or memory.peak_rss_nbytes
    scope = "all processes" if memory.peak_pss_nbytes else "this process"
    lines.append(f"  peak host memory: {size_text(peak)} ({scope}, {memory.processes} at most)")
    return "\n".join(lines) + "\n"


def _rank_lines(ranks: Sequence[RankRecord]) -> list[str]:
    if not ranks:
        return []
    samples = sum(rank.samples for rank in ranks)
    return [
        f"  all ranks: {samples} samples, {rate_text(rates.samples_per_s_of_ranks(ranks))}",
        *map(_rank_line, ranks),
    ]


def _rank_line(rank: RankRecord) -> str:
    parts = [f"  rank {rank.rank}: "]
    if rank.batches:
        stalled = rank.loading_s / rank.loop_s if rank.loop_s else 0.0
        speed = rate_text(rates.samples_per_s_of_ranks([rank]))
        parts.append(f"{rank.samples} samples in {rank.batches} batches, {speed}, stalled {stalled:.1%}")
    else:
        parts.append("no batch")
    if rank.exit_code:
        parts.append(f", exit code {rank.exit_code}")
    if rank.missing_reason:
        parts.append(f" ({rank.missing_reason})")
    return "".join(parts)


def _loader_lines(loader: LoaderRecord) -> list[str]:
    statistics = loader.statistics
    lines = [
        f"  {loader.label}: {statistics.samples} samples in {statistics.batches} batches, "
        f"{rate_text(rates.samples_per_s(statistics))}, stalled {rates.stall_fraction(statistics):.1%} of the loop, "
        f"first batch after {statistics.first_batch_s * 1000:.0f} ms",
        *_stage_lines(statistics.stages, rates.loop_s(statistics), is_watched=loader.is_watched),
        f"    iterator: {iterator_text(loader)}",
        f"    settings: {settings_text(loader)}",
    ]
    if statistics.workers_reason:
        lines.append(f"    workers: {statistics.workers} ({statistics.workers_reason})")
    if statistics.dispatch:
        lines.append(f"    dispatch: {statistics.dispatch} ({statistics.dispatch_reason})")
    if statistics.uploads:
        lines.append(
            f"    copied to the device: {statistics.uploads} batches, {statistics.uploads_hidden} of them before they "
            f"were asked for; {statistics.prefetch}"
        )
    if statistics.pinning:
        lines.append(f"    pinned: {statistics.pinning}")
    lines += [f"    {problem}" for problem in _problem_lines(statistics)]
    return lines


def _total_lines(loaders: list[LoaderRecord]) -> list[str]:
    every = [loader.statistics for loader in loaders]
    loop_s = sum(map(rates.loop_s, every))
    samples = sum(one.samples for one in every)
    stalled = sum(map(rates.loading_s, every)) / loop_s if loop_s else 0.0
    return [
        f"  all loaders: {samples} samples, {rate_text(samples / loop_s if loop_s else 0.0)}, stalled {stalled:.1%}",
        *_stage_lines(
            rates.total_stages(one.stages for one in every), loop_s, is_watched=all(one.is_watched for one in loaders)
        ),
    ]


def _stage_lines(stages: StageTimes, loop_s: float, *, is_watched: bool = False) -> list[str]:
    """Return a line for each stage; of an iterator that is not penstock's, for those that are known."""
    return [
        f"    {label:<12}{getattr(stages, field):>9.2f} s  {_percent(getattr(stages, field), loop_s):>6}  {meaning}"
        for label, field, meaning in (_STAGES[-2:] if is_watched else _STAGES)
    ]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _problem_lines(statistics: LoaderStatistics) -> list[str]:
    found = []
    if statistics.restarts:
        found.append(f"workers that died and were replaced: {statistics.restarts}")
    if statistics.quarantined:
        found.append(f"samples that killed their workers: {_first_indices(statistics.quarantined)}")
    if statistics.skipped:
        found.append(f"samples skipped: {statistics.skipped} ({_first_indices(statistics.skipped_indices)})")
    if statistics.ring.copied_out:
        found.append(f"batches copied out because the program held all slots of the ring: {statistics.ring.copied_out}")
    return found


def _first_indices(indices: tuple[object, ...]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown} …" if len(indices) > 8 else shown
