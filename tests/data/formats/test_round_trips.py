"""What one format holds, any other gives back: exactly, as far as it says that it can."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from sample_files import assert_same, datasets, write_samples

import penstock
from penstock.data.format import Format
from penstock.data.format_registry import FORMATS
from penstock.data.schema import Sample, Schema, plain

GENERAL = ("hdf5", "parquet", "arrow", "lmdb", "tfrecord", "tar", "jsonl")
"""Formats that hold anything; csv holds numbers and text, and images, tokens and video what their names say."""

ROUND = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def formats(*names: str) -> list[Format]:
    return [one for one in FORMATS if one.name in names]


def read(format: Format, path: Path) -> list[Sample]:
    source = penstock.open(path, format=format.name)
    try:
        found = list(source) if isinstance(source, penstock.Stream) else [source[i] for i in range(len(source))]
        return [{name: plain(value) for name, value in own(sample).items()} for sample in found]
    finally:
        source.close()


def own(sample: Sample) -> Sample:
    """Return the fields that were written: WebDataset's key is the reader's."""
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def check(samples: list[Sample], found: list[Sample]) -> None:
    assert len(found) == len(samples)
    for one, other in zip(samples, found, strict=True):
        assert_same({name: plain(value) for name, value in one.items()}, other)


@pytest.mark.parametrize("format", formats(*GENERAL, "csv"), ids=lambda format: format.name)
def test_what_is_written_is_read(format: Format) -> None:
    kinds = ("number", "text") if format.name == "csv" else ("array", "number", "text", "bytes")

    @ROUND
    @given(made=datasets(kinds))
    def round_trip(made: tuple[Schema, list[Sample]]) -> None:
        schema, samples = made
        assume(not format.why_unsupported(schema))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"data{format.suffixes[0]}"
            write_samples(path, samples, schema, kind=format.name)
            check(samples, read(format, path))

    round_trip()


@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise((*GENERAL, GENERAL[0]))], ids=lambda name: name)
def test_a_format_goes_into_another_and_back(first: str, second: str) -> None:
    one, other = formats(first)[0], formats(second)[0]

    @settings(ROUND, max_examples=3)
    @given(made=datasets())
    def there_and_back(made: tuple[Schema, list[Sample]]) -> None:
        schema, samples = made
        assume(not one.why_unsupported(schema) and not other.why_unsupported(schema))
        with tempfile.TemporaryDirectory() as folder:
            here, there = Path(folder) / f"a{one.suffixes[0]}", Path(folder) / f"b{other.suffixes[0]}"
            again = Path(folder) / f"c{one.suffixes[0]}"
            write_samples(here, samples, schema, kind=one.name)
            write_samples(there, read(one, here), schema, kind=other.name)
            write_samples(again, read(other, there), schema, kind=one.name)
            check(samples, read(one, again))

    there_and_back()
