"""What a conversion writes: the schema, how many records there are, and how they are cut into segments.

Both are known from the format's own word where it gives one; else all records are looked through first, in parallel.
A segment is about 64 MiB of samples: what a kill can cost a worker. A source's runs (chunks, row groups) stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.core.errors import RecordError, SourceError
from penstock.feed.convert.crew import Crew, Report
from penstock.feed.convert.journal import Journal
from penstock.feed.convert.look import Look, Looked
from penstock.feed.convert.reading import Layout, Reader, Recipe, Stretch, declared, known_layout
from penstock.feed.convert.target import Target
from penstock.feed.sources.base import Source
from penstock.feed.sources.measure import nbytes_of
from penstock.feed.sources.sample import Errors, Field, Schema, schema_of
from penstock.feed.sources.stream import Stream

SEGMENT_NBYTES = 64 << 20
_LEAST_NBYTES = 1 << 20
_MOST_SEGMENTS = 10_000
_LOOKED_AT = 8
_A_FEW = 64
_PART_RECORDS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a source holds."""

    schema: Schema
    layout: Layout
    lost: int = 0
    """Shards whose rest cannot be read; only with errors="skip"."""
    nbytes: int = 0
    """About the bytes of all samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is written."""

    schema: Schema
    layout: Layout
    lost: int
    cuts: tuple[int, ...]
    """Segment i holds the records from cuts[i] to cuts[i + 1]."""
    groups: tuple[int, ...] | None
    """How many segments each file is made of; None where their size decides."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan for the journal."""
        return {
            "schema": {name: asdict(field) for name, field in self.schema.items()},
            "counts": self.layout.counts,
            "lost": self.lost,
            "cuts": self.cuts,
            "groups": self.groups,
        }

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> Plan:
        """Return the plan that a journal holds."""
        return cls(
            schema=schema_of_json(entry["schema"]),
            layout=Layout(tuple(entry["counts"])),
            lost=entry["lost"],
            cuts=tuple(entry["cuts"]),
            groups=None if entry["groups"] is None else tuple(entry["groups"]),
        )


def schema_of_json(entry: dict[str, Any]) -> Schema:
    """Return the schema that `asdict` of its fields has made JSON of."""
    return {name: Field(**{**field, "shape": tuple(field["shape"])}) for name, field in entry.items()}


def contents(
    recipe: Recipe, errors: Errors, crew: Crew, workers: int, report: Report, journal: Journal | None = None
) -> Contents:
    """Return what a source holds; reads all of it where its format does not say.

    Also where it says that sizes differ, and its first samples do not: pictures of one size make a better file.

    Raises:
        SourceError: samples differ in their fields, or there is none to tell them.
        RecordError: one is broken, and `errors` is "raise".
    """
    reader = Reader(recipe)
    try:
        said, layout = declared(reader.source), known_layout(reader.source)
        if said is not None and layout is not None and not _may_be_narrower(reader.source, said):
            return Contents(schema=said, layout=layout, nbytes=_estimated(reader, said, layout))
        shards = 1 if isinstance(reader.source, Source) else len(reader.source.shards)
        parts = _parts(layout if isinstance(reader.source, Source) else None, shards, workers)
        where = reader.source.where
    finally:
        reader.close()
    looked = _look(recipe, parts, errors, crew, report, journal)
    schema: Schema | None = None
    for one in looked:
        if one.schema is not None:
            schema = one.schema if schema is None else merged(schema, one.schema, where)
    schema = schema or said
    if schema is None:
        raise SourceError(f"{where} has no samples, and so no fields")
    counts, cut = [0] * shards, set()
    for one in looked:
        shard = parts[one.number].shard
        counts[shard] += one.records
        if one.is_cut:
            cut.add(shard)
    return Contents(
        schema=schema, layout=Layout(tuple(counts)), lost=len(cut), nbytes=sum(one.nbytes for one in looked)
    )


def _may_be_narrower(source: Source | Stream, said: Schema) -> bool:
    """Say whether arrays whose sizes are said to differ have one size in the first samples."""
    if isinstance(source, Stream) or not any(field.is_ragged for field in said.values()):
        return False
    try:
        seen = [schema_of(source[index]) for index in range(min(len(source), _A_FEW))]
    except RecordError:  # which is told when it is converted
        return False
    return all(schema == seen[0] for schema in seen) and bool(seen)


def _parts(layout: Layout | None, shards: int, workers: int) -> list[Stretch]:
    """Return parts to be looked through: ranges where records have numbers, else shards, or every n-th record."""
    if layout is not None:
        total = layout.total
        count = max(1, min(total, max(4 * workers, total // _PART_RECORDS), _MOST_SEGMENTS))
        ends = [total * number // count for number in range(count + 1)]
        return [Stretch(0, first, stop) for first, stop in pairwise(ends)]
    step = max(1, -(-workers // max(1, shards)))
    return [Stretch(shard, first, None, step) for shard in range(shards) for first in range(step)]


def _look(
    recipe: Recipe, parts: list[Stretch], errors: Errors, crew: Crew, report: Report, journal: Journal | None
) -> list[Looked]:
    looked: dict[int, Looked] = {}
    if journal is not None:
        begun = journal.last("looking")
        if begun is None:
            journal.append("looking", parts=[[part.shard, part.first, part.stop, part.step] for part in parts])
        else:
            parts[:] = [Stretch(*part) for part in begun["parts"]]
        for entry in journal.all("looked"):
            schema = None if entry["schema"] is None else schema_of_json(entry["schema"])
            looked[entry["number"]] = Looked(**{**entry["looked"], "number": entry["number"], "schema": schema})
    tasks = [
        Look(number=number, recipe=recipe, stretch=part, errors=errors)
        for number, part in enumerate(parts)
        if number not in looked
    ]
    for _, found in crew.run(tasks, report):
        looked[found.number] = found
        if journal is not None:
            values = asdict(found)
            schema = values.pop("schema")
            journal.append("looked", number=values.pop("number"), schema=schema, looked=values)
    return [looked[number] for number in sorted(looked)]


def merged(one: Schema, other: Schema, where: str) -> Schema:
    """Return a schema wide enough for both.

    Raises:
        SourceError: they differ in more than sizes.

    >>> merged({"x": Field("array", "int8", (2,))}, {"x": Field("array", "int8", (3,))}, "data")["x"].words()
    'int8[?]'
    """
    if one.keys() != other.keys():
        raise SourceError(
            f"{where}: samples have the fields {sorted(one)} and {sorted(other)}; all need the same: choose with "
            "fields= (--fields a,b)"
        )
    wide = dict(one)
    for name, old in one.items():
        new = other[name]
        if (old.kind, old.dtype, len(old.shape)) != (new.kind, new.dtype, len(new.shape)):
            raise SourceError(f"{where}: field {name!r} is {new.words()} in one sample and {old.words()} in another")
        sizes = (size if size == found else None for size, found in zip(old.shape, new.shape, strict=True))
        wide[name] = replace(old, shape=tuple(sizes))
    return wide


def _estimated(reader: Reader, schema: Schema, layout: Layout) -> int:
    """Return about how many bytes all samples have."""
    if all(field.nbytes() or field.kind == "number" for field in schema.values()):
        return layout.total * sum(field.nbytes() or np.dtype(field.dtype).itemsize for field in schema.values())
    sizes = []
    for number in sorted({layout.total * one // _LOOKED_AT for one in range(_LOOKED_AT)} if layout.total else ()):
        for stretch in layout.stretches(number, number + 1):
            sizes += [nbytes_of(record) for record in reader.records(stretch) if not isinstance(record, RecordError)]
    return layout.total * sum(sizes) // max(1, len(sizes))


def planned(held: Contents, target: Target, runs: np.ndarray | None, workers: int, *, joins: bool) -> Plan:
    """Return how a source's records are cut.

    Args:
        held: what it holds.
        target: what is to be made.
        runs: where its runs begin.
        workers: how many will write.
        joins: whether the target's format can make one file of several.
    """
    total = held.layout.total
    if target.shards is None and joins:
        most = min(SEGMENT_NBYTES, max(1, (target.shard_nbytes or 1) // 4))
        return _plan(held, _cuts(0, total, _wanted(held, total, workers, most), runs), None)
    shards = target.shards
    if shards is None:
        shards = max(1, min(total, -(-held.nbytes // (target.shard_nbytes or 1)), _MOST_SEGMENTS))
    ends = [total * number // shards for number in range(shards + 1)]
    if not joins:
        return _plan(held, ends, (1,) * shards)
    cuts, groups = [0], []
    for first, stop in pairwise(ends):
        want = -(-_wanted(held, total, workers, SEGMENT_NBYTES) // shards)
        inner = _cuts(first, stop, want, runs)
        cuts += inner[1:]
        groups.append(len(inner) - 1)
    return _plan(held, cuts, tuple(groups))


def _plan(held: Contents, cuts: Sequence[int], groups: tuple[int, ...] | None) -> Plan:
    return Plan(schema=held.schema, layout=held.layout, lost=held.lost, cuts=tuple(cuts), groups=groups)


def _wanted(held: Contents, total: int, workers: int, most_nbytes: int) -> int:
    """Return how many segments to make of all records."""
    by_size = -(-held.nbytes // most_nbytes)
    spread = min(4 * max(1, workers), -(-held.nbytes // min(_LEAST_NBYTES, most_nbytes)))
    return max(1, min(total, max(by_size, spread), _MOST_SEGMENTS))


def _cuts(first: int, stop: int, count: int, runs: np.ndarray | None) -> list[int]:
    """Return where segments begin, and the end; at beginnings of runs, where there are enough."""
    inner = np.array([first + (stop - first) * number // count for number in range(1, count)], np.int64)
    if runs is not None and len(runs) > 2 and len(inner):
        inner = runs[np.clip(np.searchsorted(runs, inner), 0, len(runs) - 1)]
    kept = {int(cut) for cut in inner if first < cut < stop}
    return [first, *sorted(kept), stop]


def grouped(plan: Plan, target: Target, nbytes: Sequence[int]) -> list[range]:
    """Return the segments that each file is made of.

    Args:
        plan: the plan.
        target: may limit the files' size.
        nbytes: of each segment's file.
    """
    if plan.groups is not None:
        ends = [0, *np.cumsum(plan.groups).tolist()]
        return [range(first, stop) for first, stop in pairwise(ends)]
    groups, first, size = [], 0, 0
    for number, more in enumerate(nbytes):
        if number > first and size + more > (target.shard_nbytes or 0):
            groups.append(range(first, number))
            first, size = number, 0
        size += more
    return [*groups, range(first, len(nbytes))]
