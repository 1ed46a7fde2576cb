"""Compares digests of indices that loaders were handed: whether two runs, or the ranks of one, part, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.stats import IndexDigest, LoaderStatistics
from penstock.observe.record.run_record import LoaderRecord, RunRecord

_MOST_LINES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderComparison:
    """What the digests of two runs say, one sentence each."""

    parted: tuple[str, ...] = ()
    """Where loaders were handed other indices, or the same in another order."""

    equal: tuple[str, ...] = ()
    """Which loaders were handed the same."""


def compare_digests(run: RunRecord, reference: RunRecord) -> OrderComparison:
    """Return what the digests of two runs' loaders say; loaders of one name and rank are compared."""
    others = {(loader.name, loader.rank): loader for loader in reference.loaders}
    parted, equal = [], []
    for loader in run.loaders:
        other = others.get((loader.name, loader.rank))
        if other is None:
            continue
        common = _common(loader, other)
        place = _parting(loader.statistics.index_digests, other.statistics.index_digests, common)
        name = loader.name if loader.rank is None else f"{loader.name} of rank {loader.rank}"
        if place:
            parted.append(f"{name} was handed other indices, or in another order, {place}")
        elif common:
            epoch, _, batches = max(common)
            end = "the end of epoch" if batches == _END else f"batch {batches:.0f} of epoch"
            equal.append(f"{name} was handed the same indices in the same order, up to {end} {epoch}")
    return OrderComparison(parted=_few(parted), equal=_few(equal))


def compare_ranks(loaders: Sequence[LoaderRecord]) -> tuple[str, ...]:
    """Return what the digests of one run's ranks say, one sentence for each loader.

    Ranks with the same share of the samples, as those of one tensor-parallel replica, must be handed the same indices,
    and ranks with different shares others.
    """
    by_name: dict[str, list[LoaderRecord]] = {}
    for loader in loaders:
        if loader.rank is not None and loader.statistics.share is not None:
            by_name.setdefault(loader.name, []).append(loader)
    told = (_ranks_text(name, ranks) for name, ranks in by_name.items() if len(ranks) > 1)
    return _few([text for text in told if text])


def _ranks_text(name: str, loaders: Sequence[LoaderRecord]) -> str:
    shares: dict[tuple[int, int] | None, LoaderRecord] = {}
    holders: dict[IndexDigest, LoaderRecord] = {}
    compared = parted = 0
    for loader in loaders:
        counted, last = loader.statistics, loader.statistics.index_digests[-1:]
        first = shares.setdefault(counted.share, loader)
        if first is not loader and (common := _common(loader, first)):
            compared += 1
            if place := _parting(first.statistics.index_digests, counted.index_digests, common):
                if counted.share != (0, 1):
                    between = f"ranks {first.rank} and {loader.rank}"
                    return f"{name}: {between} must be handed the same indices, and theirs part {place}"
                parted += 1
        holder = holders.setdefault(last[0], loader) if last else loader
        # Of one sample for each rank, shares that were padded may be the same.
        if holder.statistics.share != counted.share and counted.samples > max(1, counted.epochs):
            between = f"ranks {holder.rank} and {loader.rank}"
            return f"{name}: {between} must be handed other indices, and were handed the same (digest {last[0].digest})"
    if [*shares] == [(0, 1)]:
        is_same = compared and not parted
        return f"{name}: every rank was handed the same indices, as only ranks of one replica need" if is_same else ""
    if not holders:
        return ""
    same = "ranks with the same share the same indices, and others others" if compared else "each other indices"
    return f"{name}: {len(loaders)} ranks have {len(shares)} shares of the samples, and were handed {same}"


def digest_text(statistics: LoaderStatistics) -> str:
    """Return the digest of the last pass, or why there is none.

    >>> digest_text(LoaderStatistics(index_digests=(IndexDigest(epoch=1, batches=3, digest="0123456789abcdef"),)))
    'digest 0123456789abcdef after 3 batches of epoch 1'
    """
    if statistics.index_digest_reason or not statistics.index_digests:
        return f"no digest: {statistics.index_digest_reason}" if statistics.index_digest_reason else ""
    last = statistics.index_digests[-1]
    return f"digest {last.digest} after {last.batches} batches of epoch {last.epoch}"


_Place = tuple[int, int, float]
"""Epoch, where the digest begins, batches; all of them at the end of the pass."""

_END = float("inf")


def _places(digests: Sequence[IndexDigest]) -> dict[_Place, IndexDigest]:
    inner: dict[_Place, IndexDigest] = {(one.epoch, one.start, one.batches): one for one in digests}
    return inner | {(one.epoch, one.start, _END): one for one in digests if one.is_end}


def _common(loader: LoaderRecord, other: LoaderRecord) -> list[_Place]:
    """Return where both have a digest, in order; within a pass only where they count the same batches."""
    places = {*_places(loader.statistics.index_digests)} & {*_places(other.statistics.index_digests)}
    if loader.settings.get("batch_size") != other.settings.get("batch_size"):
        places = {place for place in places if place[2] == _END}
    return sorted(places)


def _parting(ours: Sequence[IndexDigest], theirs: Sequence[IndexDigest], common: Sequence[_Place]) -> str:
    """Return where the digests part, as text; empty if they do not."""
    here, there = _places(ours), _places(theirs)
    agreed = 0
    epoch = -1
    for place in common:
        one, other = here[place], there[place]
        if place[0] != epoch:
            epoch, agreed = place[0], 0
        if one.digest != other.digest:
            last = max(one.batches, other.batches)
            where = f"in batch {last}" if agreed + 1 >= last else f"in batches {agreed + 1} to {last}"
            return f"first {where} of epoch {epoch} (digests {one.digest} and {other.digest})"
        agreed = one.batches
    return ""


def _few(lines: list[str]) -> tuple[str, ...]:
    more = [f"and so {len(lines) - _MOST_LINES} more loaders"] if len(lines) > _MOST_LINES else []
    return (*lines[:_MOST_LINES], *more)
