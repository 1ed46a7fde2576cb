"""A `RunRecord` as text: what `penstock run` prints at its end, and with all details `penstock report`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.stats import LoaderStatistics
from penstock.core.units import size_text
from penstock.observe.meters.host_memory import HostMemory
from penstock.observe.record.compare_digests import compare_ranks, digest_text
from penstock.observe.record.formatting import percent_text, rate_text, time_text, uploads_text
from penstock.observe.record.group_loaders import group_loaders, group_uncounted, iterator_text, settings_text
from penstock.observe.record.memory_parts import device_memory_bar
from penstock.observe.record.rank_record import RankRecord
from penstock.observe.record.rates import Totals
from penstock.observe.record.run_record import LoaderRecord, RunRecord
from penstock.observe.record.time_parts import Part, loop_parts, worker_parts
from penstock.observe.report.headline import headline, not_watched

_FINDINGS = 3
"""As many are listed; report.html has all."""

_MOST_RANKS = 16
"""More are not all shown; run.json has them."""


def render(record: RunRecord, *, details: bool = True) -> str:
    """Return the report of `record` as lines of plain text; the result of it, and what to change, come last.

    Args:
        record: the run.
        details: give each loader its own table of parts, and its settings. Otherwise it has a line, and what is unusual
            about it; the table is that of all loaders.
    """
    code = "unknown" if record.exit_code is None else record.exit_code
    lines = [f"penstock: {' '.join(record.command)} ran {record.wall_s:.1f} s, exit code {code}"]
    if record.error:
        lines.append(f"  ended by {record.error}")
    used, uncounted = group_loaders(record.loaders), group_uncounted(record.loaders)
    if not used and not uncounted:
        lines.append("  the main process loaded no batch through a DataLoader")
    lines += _caveat_lines(record)
    for loader in used:
        lines += _loader_lines(loader, details)
    lines += [f"  {loader.label}: {iterator_text(loader)}; its batches were not counted" for loader in uncounted]
    if len(used) > 1:
        lines += _total_lines(record.loaders, record.totals)
    elif used and not details:
        lines += _part_lines(used)
    lines += _rank_lines(record.ranks, record.totals)
    lines += [f"  indices: {text}" for text in compare_ranks(record.loaders)]
    if record.baseline is not None:
        lines.append(record.baseline.render())
    lines.append(_memory_line(record.memory))
    if record.device_memory is not None:
        bar = device_memory_bar(record.device_memory)
        parts = "; ".join(f"{part.label} {part.text}" for part in bar.parts)
        lines.append(f"  peak device memory: {bar.text} ({parts})")
    if not record.has_failed:  # otherwise what to do about loading is not what the reader needs now
        lines += _result_lines(record)
    return "\n".join(lines) + "\n"


def _caveat_lines(record: RunRecord) -> list[str]:
    """Return what makes the figures less than they look: processes that were not watched, a machine that was busy."""
    unseen = not_watched(record)
    lines = [f"  {unseen}"] if unseen else []
    if record.load >= max(1, record.cpus):
        lines.append(
            f"  the machine was busy: {record.load:.1f} processes ran or waited for a core when the run began, and it "
            f"has {record.cpus}; times and estimates are those of a busy machine"
        )
    return lines


def _memory_line(memory: HostMemory) -> str:
    if memory.peak_pss_nbytes is None:
        return f"  peak host memory: {size_text(memory.peak_rss_nbytes)} (this process)"
    return (
        f"  peak host memory: {size_text(memory.peak_pss_nbytes)} (all processes, {memory.processes} at most, sampled "
        "every 2 s or less often)"
    )


def _result_lines(record: RunRecord) -> list[str]:
    lines = []
    if any(loader.statistics.batches for loader in record.loaders) and record.totals.loop_s:
        result = headline(record)
        lines += [f"  {sentence}" for sentence in (result.text, result.more) if sentence]
    for finding in record.findings[:_FINDINGS]:
        where = f"{finding.loader}: " if finding.loader else ""
        gain = f"{finding.gain_text}: " if finding.gain is not None else ""
        lines += [f"  {where}{finding.cause}", *([f"    ▸ {gain}{finding.remedy}"] if finding.remedy else [])]
    return lines


def _rank_lines(ranks: Sequence[RankRecord], totals: Totals) -> list[str]:
    if not ranks:
        return []
    return [
        f"  all ranks: {totals.samples} samples, {rate_text(totals.samples_per_s)}",
        *map(_rank_line, shown := _shown_ranks(ranks)),
        *([f"  {len(ranks) - len(shown)} other ranks: see run.json"] if len(shown) < len(ranks) else []),
    ]


def _shown_ranks(ranks: Sequence[RankRecord]) -> list[RankRecord]:
    """Return all, where they are few; else those that did not end well, and those that have waited most."""
    if len(ranks) <= _MOST_RANKS:
        return [*ranks]
    unusual = sorted(ranks, key=lambda rank: (not _is_unusual(rank), -rank.stall_fraction))
    return sorted(unusual[:_MOST_RANKS], key=lambda rank: rank.rank)


def _is_unusual(rank: RankRecord) -> bool:
    return bool(rank.exit_code or rank.missing_reason or not rank.batches)


def _rank_line(rank: RankRecord) -> str:
    parts = [f"  rank {rank.rank}: "]
    if rank.batches:
        parts.append(
            f"{rank.samples} samples in {rank.batches} batches, {rate_text(rank.samples_per_s)}, waited for data "
            f"{percent_text(rank.stall_fraction)} of the time"
        )
    else:
        parts.append("no batch")
    if rank.exit_code:
        parts.append(f", exit code {rank.exit_code}")
    if rank.missing_reason:
        parts.append(f" ({rank.missing_reason})")
    return "".join(parts)


def _loader_lines(loader: LoaderRecord, details: bool) -> list[str]:
    statistics = loader.statistics
    lines = [
        f"  {loader.label}: {statistics.samples} samples in {statistics.batches} batches, "
        f"{rate_text(statistics.samples_per_s)}, {_waited(statistics)}, "
        f"first batch after {time_text(statistics.first_batch_s)}"
    ]
    if details:
        lines += [*_part_lines([loader]), f"    iterator: {iterator_text(loader)}", *_setting_lines(loader)]
    elif loader.iterator != "replaced":
        lines.append(f"    iterator: {iterator_text(loader)}")
    return lines + [f"    {problem}" for problem in _problem_lines(statistics)]


def _setting_lines(loader: LoaderRecord) -> list[str]:
    statistics = loader.statistics
    lines = [f"    settings: {settings_text(loader)}"]
    if order := digest_text(statistics):
        lines.append(f"    indices: {order}")
    if statistics.workers_reason:
        lines.append(f"    workers: {statistics.workers} ({statistics.workers_reason})")
    if statistics.dispatch:
        lines.append(f"    dispatch: {statistics.dispatch} ({statistics.dispatch_reason})")
    if statistics.uploads:
        lines.append(f"    copied to the device: {uploads_text(statistics.uploads, statistics.copy_wait_s)}")
    if statistics.pinning:
        lines.append(f"    pinned: {statistics.pinning}")
    return lines


def _total_lines(loaders: Sequence[LoaderRecord], totals: Totals) -> list[str]:
    speed = rate_text(totals.samples_per_s)
    return [f"  all loaders: {totals.samples} samples, {speed}, {_waited(totals)}", *_part_lines(loaders)]


def _waited(counted: LoaderStatistics | Totals) -> str:
    return f"waited for data {percent_text(counted.stall_fraction)} of the time in loops"


def _part_lines(loaders: Sequence[LoaderRecord]) -> list[str]:
    """Return a line for each part of the loops' time, and for what the workers did meanwhile."""
    workers = worker_parts(loaders)
    lines = [line for part in loop_parts(loaders) for line in (_part_line(part, 4), *_inner_lines(part))]
    return lines + (["    workers, all together:"] + [_part_line(part, 6) for part in workers] if workers else [])


def _inner_lines(part: Part) -> list[str]:
    return [_part_line(inner, 6) for inner in part.parts]


def _part_line(part: Part, indent: int) -> str:
    return f"{' ' * indent + part.label:<22}{part.amount:>9.2f} s  {part.share:>11}  {part.meaning}"


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
