"""An inspection reports what a data set holds, and what is broken."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from sample_files import write_samples

from penstock.core.errors import OptionError, SourceError
from penstock.data.inspect import inspect, inspector
from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.inspection import render
from penstock.data.schema import Sample


def make_samples(count: int) -> list[Sample]:
    return [
        {
            "x": np.full((3, 2 + number % 4), number, np.float32),
            "y": np.int64(number),
            "t": "é\x1b[31m" + "a" * (number % 3),
            "b": b"\xff" * (number % 5),
        }
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "_MAX_SECONDS", 60)  # as many samples are read on a slow machine


@pytest.mark.parametrize(("kind", "is_stream"), [("tfrecord", True), ("lmdb", False)])
def test_fields_have_types_sizes_and_statistics(tmp_path: Path, kind: str, is_stream: bool) -> None:
    path = write_samples(tmp_path / f"in.{kind}", make_samples(100))
    found = inspect(path)
    assert (found.format, found.files, found.is_stream, found.samples_read) == (kind, 1, is_stream, 100)
    assert found.samples == (None if is_stream else 100)
    assert found.nbytes == os.path.getsize(path)
    assert found.fields["x"] == FieldSummary(
        types=["float32[3, 2..5]"], min=0.0, max=99.0, mean=pytest.approx(49.5), samples=100
    )
    assert found.fields["t"] == FieldSummary(types=["text"], lengths=(6, 8), samples=100)
    assert found.fields["b"] == FieldSummary(types=["bytes"], lengths=(0, 4), samples=100)
    assert len(found.examples) == 3


def test_what_files_hold_cannot_control_a_terminal(tmp_path: Path) -> None:
    found = inspect(write_samples(tmp_path / "in.lmdb", make_samples(10)))
    text = render(found)
    assert "\x1b" not in text
    assert r"t: 'é\x1b[31m'" in text


def test_json_has_a_schema_and_no_numbers_that_json_lacks(tmp_path: Path) -> None:
    samples = [{"x": np.array([np.nan, np.inf, 2.0], np.float32)}, {"x": np.array([np.nan] * 3, np.float32)}]
    found = inspect(write_samples(tmp_path / "in.lmdb", samples))
    report = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert report["schema"] == "penstock.inspect/1"
    assert report["fields"]["x"]["nonfinite"] == 5
    assert (report["fields"]["x"]["min"], report["fields"]["x"]["max"], report["fields"]["x"]["mean"]) == (
        2.0,
        2.0,
        2.0,
    )
    assert report["examples"][0] == {"x": "float32[3]: nan inf 2"}


def test_broken_records_are_reported_and_counted(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "in.tfrecord", make_samples(20))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = inspect(path)
    assert found.samples_read == 19
    assert len(found.errors) == 1
    assert "in.tfrecord: record" in found.errors[0]
    assert "broken: " in render(found)


def test_a_missing_path_and_negative_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        inspect(tmp_path / "nothing.tfrecord")
    with pytest.raises(SourceError, match="known suffix"):
        inspect(tmp_path)
    with pytest.raises(OptionError):
        inspect(tmp_path, samples=-1)


def test_an_empty_file_has_no_fields(tmp_path: Path) -> None:
    (tmp_path / "in.tfrecord").write_bytes(b"")
    found = inspect(tmp_path / "in.tfrecord")
    assert (found.samples_read, found.fields, found.examples) == (0, {}, [])
    assert "samples: unknown" in render(found)


def test_row_groups_are_counted(tmp_path: Path) -> None:
    found = inspect(write_samples(tmp_path / "in.parquet", make_samples(20)))
    assert found.chunks == 1
    assert "chunks: 1 (or row groups; about 20 samples each)" in render(found)


@pytest.mark.parametrize("kind", ["tfrecord", "lmdb", "hdf5", "parquet", "tar", "jsonl"])
def test_damaged_files_give_a_report_or_a_documented_error(tmp_path: Path, kind: str) -> None:
    path = write_samples(tmp_path / f"in.{kind}", make_samples(20))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(30):
        damaged = bytearray(data)
        for at in rng.integers(0, len(data), 8):
            damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged[: int(rng.integers(len(data) // 2, len(data) + 1))])
        with contextlib.suppress(SourceError):
            render(inspect(path))
