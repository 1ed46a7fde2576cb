"""Compares two sources sample by sample, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from penstock.core.errors import RecordError, SourceError
from penstock.feed.convert.canon import Tally, difference
from penstock.feed.convert.crew import Crew, Report
from penstock.feed.convert.reading import Layout, Recipe, Stretch
from penstock.feed.convert.tasks import Bench
from penstock.feed.sources.sample import Errors, Sample

_RECORDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare:
    """Compare records of two sources, one by one, in their order; broken ones are left out."""

    number: int
    one: Recipe
    other: Recipe
    one_stretches: tuple[Stretch, ...]
    other_stretches: tuple[Stretch, ...]
    first: int
    errors: Errors

    def run(self, bench: Bench) -> tuple[str, Tally]:
        """Return where they first differ, or "", and what is equal."""
        pair = zip_longest(
            samples_of(bench, self.one, self.one_stretches, self.errors),
            samples_of(bench, self.other, self.other_stretches, self.errors),
        )
        tally = Tally()
        for one, other in pair:
            number = self.first + tally.samples
            if one is None or other is None:
                return f"one has {'more' if other is None else 'fewer'} than {number} samples", tally
            if words := difference(one, other):
                return f"sample {number}: {words}", tally
            before = tally.nbytes
            tally.add(one)
            bench.count(1, tally.nbytes - before)
        return "", tally


def samples_of(bench: Bench, recipe: Recipe, stretches: tuple[Stretch, ...], errors: Errors) -> Iterator[Sample]:
    """Yield the samples of a source's stretches; broken records are left out, if `errors` is "skip"."""
    reader = bench.reader(recipe)
    for stretch in stretches:
        try:
            for record in reader.records(stretch):
                if not isinstance(record, RecordError):
                    yield record
                elif errors == "raise":
                    raise record
        except RecordError:
            if errors == "raise":
                raise


def compare(
    one: Recipe,
    other: Recipe,
    one_layout: Layout,
    other_layout: Layout,
    crew: Crew,
    report: Report,
    *,
    errors: Errors,
    in_step: bool,
    is_ordered: bool = True,
) -> Tally:
    """Read two sources, and see that they hold equal samples in the same order.

    Args:
        one: the first.
        other: the second.
        one_layout: its records.
        other_layout: those of the second.
        crew: does it.
        report: is told of progress.
        errors: "skip" leaves out broken records of either.
        in_step: whether records of the same number are to be compared, so that parts can be read at once; else all are
            read in one go.
        is_ordered: whether the order has to be the same; else checksums are compared.

    Raises:
        SourceError: they differ; the message says where.
    """
    if not is_ordered:
        tallies = [
            _summed(recipe, layout, crew, report, errors)
            for recipe, layout in ((one, one_layout), (other, other_layout))
        ]
        if tallies[0] != tallies[1]:
            raise SourceError(f"{_name(one)} and {_name(other)} differ: they do not hold the same samples")
        return tallies[0]
    total, most = one_layout.total, max(one_layout.total, other_layout.total)
    size = _RECORDS if in_step and total == other_layout.total else max(1, most)
    tasks = [
        Compare(
            number=number,
            one=one,
            other=other,
            one_stretches=one_layout.stretches(first, first + size),
            other_stretches=other_layout.stretches(first, first + size),
            first=first,
            errors=errors,
        )
        for number, first in enumerate(range(0, most, size))
    ]
    tally = Tally()
    for _, (words, counted) in crew.run(tasks, report):
        if words:
            raise SourceError(f"{_name(one)} and {_name(other)} differ: {words}")
        tally.add_tally(counted)
    return tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Read records for their checksum."""

    number: int
    recipe: Recipe
    stretches: tuple[Stretch, ...]
    errors: Errors

    def run(self, bench: Bench) -> Tally:
        """Return it."""
        tally = Tally()
        for sample in samples_of(bench, self.recipe, self.stretches, self.errors):
            before = tally.nbytes
            tally.add(sample)
            bench.count(1, tally.nbytes - before)
        return tally


def _summed(recipe: Recipe, layout: Layout, crew: Crew, report: Report, errors: Errors) -> Tally:
    tally = Tally()
    tasks = [
        Sum(number=number, recipe=recipe, stretches=layout.stretches(first, first + _RECORDS), errors=errors)
        for number, first in enumerate(range(0, layout.total, _RECORDS))
    ]
    for _, one in crew.run(tasks, report):
        tally.add_tally(one)
    return tally


def _name(recipe: Recipe) -> str:
    return recipe.path if isinstance(recipe.path, str) else ", ".join(recipe.path[:3])
