"""Samples that hypothesis makes up, files of them, and what is read back: for round trips through any format."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import penstock
from penstock.core.errors import RecordError
from penstock.data.format_registry import format_named, format_of_path
from penstock.data.schema import DTYPES as EVERY_DTYPE
from penstock.data.schema import Field, Sample, Schema, merge_schemas, schema_of

DTYPES = tuple(name for name in EVERY_DTYPE if not name.startswith("complex"))
NAMES = st.text("abcxyz_0189", min_size=1, max_size=6).filter(lambda name: name[0].isalpha())
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


def numbers(dtype: str) -> st.SearchStrategy[Any]:
    """Return NumPy scalars of `dtype`."""
    return npst.from_dtype(np.dtype(dtype)).map(lambda value: np.asarray(value, dtype)[()])


def fields(kinds: tuple[str, ...] = ("array", "number", "text", "bytes")) -> st.SearchStrategy[Field]:
    """Return fields; every other array is ragged."""
    shapes = st.lists(st.one_of(st.integers(0, 4), st.none()), min_size=1, max_size=3).map(tuple)
    strategies = {
        "array": st.builds(Field, st.just("array"), st.sampled_from(DTYPES), shapes),
        "number": st.builds(Field, st.just("number"), st.sampled_from(DTYPES)),
        "text": st.just(Field("text")),
        "bytes": st.just(Field("bytes")),
    }
    return st.one_of([strategies[kind] for kind in kinds])


def schemas(kinds: tuple[str, ...] = ("array", "number", "text", "bytes"), most: int = 4) -> st.SearchStrategy[Schema]:
    """Return schemas of one to `most` fields."""
    return st.dictionaries(NAMES, fields(kinds), min_size=1, max_size=most)


def values(field: Field) -> st.SearchStrategy[Any]:
    """Return values of one field."""
    if field.kind == "text":
        return TEXT
    if field.kind == "bytes":
        return st.binary(max_size=20)
    if field.kind == "number":
        return numbers(field.dtype)
    sizes = st.tuples(*(st.integers(0, 4) if size is None else st.just(size) for size in field.shape))
    return sizes.flatmap(lambda shape: npst.arrays(field.dtype, shape))


def samples(schema: Schema, most: int = 8) -> st.SearchStrategy[list[Sample]]:
    """Return up to `most` samples of a schema."""
    return st.lists(st.fixed_dictionaries({name: values(field) for name, field in schema.items()}), max_size=most)


@st.composite
def datasets(
    draw: Callable[..., Any], kinds: tuple[str, ...] = ("array", "number", "text", "bytes"), most: int = 8
) -> tuple[Schema, list[Sample]]:
    """Return a schema and samples of it; the schema is as wide as these samples need, and no wider."""
    schema = draw(schemas(kinds))
    made = draw(samples(schema, most))
    return schema_of_all(made) if made else schema, made


def schema_of_all(samples: list[Sample]) -> Schema:
    """Return a schema that is as wide as these samples need, and no wider."""
    schema = schema_of(samples[0])
    for sample in samples[1:]:
        schema = merge_schemas(schema, schema_of(sample), "made")
    return schema


def write_samples(
    path: Path | str, samples: list[Sample], schema: Schema | None = None, *, kind: str = "", **options: Any
) -> Path:
    """Write a file of the format `kind`, or that its name tells."""
    format = format_named(kind) if kind else format_of_path(str(path))
    assert format is not None, path
    assert format.writer is not None, path
    writer = format.writer(str(path), schema or schema_of_all(samples), **options)
    for sample in samples:
        writer.write(sample)
    writer.close()
    return Path(path)


def write_text(path: Path, text: str | bytes) -> Path:
    """Write text; packed, where the name says so."""
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def samples_in(path: Any, **options: Any) -> list[Sample]:
    """Return all samples of what `penstock.open` opens."""
    with closing(penstock.open(path, **options)) as source:
        return list(source)


def outcomes(stream: Any, first: int = 0, step: int = 1) -> list[Any]:
    """Return what reading a stream's first shard gives, errors among it."""
    found: list[Any] = []
    try:
        found += stream.read(stream.shards[0], first, step)
    except RecordError as error:
        found.append(error)
    return found


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Fail where two samples differ in a field's type, dtype, shape or bytes (any NaN equals any NaN)."""
    assert sorted(one) == sorted(other)
    for name, value in one.items():
        found = other[name]
        if isinstance(value, np.ndarray | np.generic):
            assert isinstance(found, np.ndarray | np.generic), name
            assert isinstance(value, np.ndarray) == isinstance(found, np.ndarray), name
            assert value.dtype == found.dtype, (name, value.dtype, found.dtype)
            np.testing.assert_array_equal(value, found)
        else:
            assert type(value) is type(found), (name, type(value), type(found))
            assert value == found, name


def assert_all_same(some: list[Sample], others: list[Sample]) -> None:
    """Fail where two lists of samples differ."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert_same(one, other)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few of them changed, inserted or removed."""
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(mutant) + 1)
        what = rng.random()
        if what < 0.6 and at < len(mutant):
            mutant[at] = rng.choice([mutant[at] ^ (1 << rng.randrange(8)), 0, 0xFF, rng.randrange(256)])
        elif what < 0.75:
            mutant[at:at] = rng.randbytes(rng.randint(1, 9))
        elif what < 0.9:
            del mutant[at : at + rng.randint(1, 9)]
        else:
            del mutant[at:]
    return bytes(mutant)
