"""The list of formats: what a lookup imports, and what adding a format takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_files import write_samples

import penstock
from penstock.core.errors import OptionError, SourceError
from penstock.data import format_registry
from penstock.data.convert import convert
from penstock.data.format import Format, Implementation
from penstock.data.format_registry import FORMATS, format_named, format_of_path
from penstock.data.inspect import inspect
from penstock.data.schema import Errors, Field, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.storage import Storage


class Numbers(Source):
    """One integer a line: sample i is {"x": the integer of line i}."""

    def __init__(self, paths: list[str], base: int) -> None:
        self.where = paths[0]
        self._lines = [int(line, base) for path in paths for line in Path(path).read_text().split()]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, index: int) -> Sample:
        return {"x": np.int64(self._lines[index])}


class NumbersWriter:
    def __init__(self, path: str, schema: Schema, *, base: int = 10) -> None:
        self._path, self._base = path, base
        self._lines: list[str] = []

    def write(self, sample: Sample) -> None:
        self._lines.append(np.base_repr(int(sample["x"]), self._base) + "\n")

    def close(self) -> None:
        Path(self._path).write_text("".join(self._lines))


def open_files(paths: list[str], storage: Storage, fields: Selection, errors: Errors, *, base: int = 10) -> Source:
    return Numbers([storage.local(path) for path in paths], base)


def why_unsupported(schema: Schema) -> str:
    return "" if schema == {"x": Field("number", "int64")} else "it holds one field x of int64"


def load() -> Implementation:
    return Implementation(open_files=open_files, writer=NumbersWriter, why_unsupported=why_unsupported)


NUMBERS = Format(name="numbers", suffixes=(".numbers",), load=load)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_registry, "FORMATS", (*FORMATS, NUMBERS))


@pytest.mark.usefixtures("_registered")
def test_a_format_needs_one_registration_to_be_opened_written_converted_and_inspected(tmp_path: Path) -> None:
    samples = [{"x": np.int64(number)} for number in range(20)]
    path = write_samples(tmp_path / "a.numbers", samples)
    assert [sample["x"] for sample in penstock.open(path)] == [*range(20)]
    assert [sample["x"] for sample in penstock.open(tmp_path)] == [*range(20)]
    assert penstock.open(path, base=16)[11]["x"] == 0x11

    assert convert(path, tmp_path / "b.parquet", workers=0, verify=True).samples == 20
    back = convert(tmp_path / "b.parquet", tmp_path / "c.numbers", workers=0, verify=True, writer_options={"base": 8})
    assert back.samples == 20
    assert (tmp_path / "c.numbers").read_text().split()[9] == "11"

    found = inspect(path)
    assert (found.format, found.samples, found.files) == ("numbers", 20, 1)
    assert found.fields["x"].types == ["int64"]


@pytest.mark.usefixtures("_registered")
def test_options_and_schemas_of_an_added_format_are_checked(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "a.numbers", [{"x": np.int64(1)}])
    with pytest.raises(OptionError, match=r"numbers has no option size=; it has base= \(.*test_format_registry\)"):
        penstock.open(path, size=3)
    (tmp_path / "b.jsonl").write_text('{"y": "text"}\n')
    with pytest.raises(SourceError, match="it holds one field x of int64"):
        convert(tmp_path / "b.jsonl", tmp_path / "b.numbers", workers=0)


def test_each_format_is_found_by_its_name_and_its_suffixes() -> None:
    for format in FORMATS:
        assert format_named(format.name) is format
        assert all(format_of_path(f"s3://bucket/train{suffix.upper()}") is format for suffix in format.suffixes)


def test_each_format_loads_and_names_its_options() -> None:
    for format in FORMATS:
        with pytest.raises(OptionError, match=f"{format.name} has no option nonsense=; it has .*max_"):
            format.check_options(format.open_files, {"nonsense": 1})
        assert (format.writer is None) == (format.name in ("audio", "video"))
        assert isinstance(format.why_unsupported({}), str)


def test_looking_up_a_format_imports_neither_torch_nor_any_reader() -> None:
    code = """
import sys
import penstock.data.format_registry as format_registry
for format in format_registry.FORMATS:
    format_registry.format_of_path("train" + format.suffixes[0])
heavy = {"torch", "numpy", "h5py", "pyarrow", "lmdb", "zarr", "av", "PIL", "google_crc32c", "fsspec"}
readers = {name for name in sys.modules if name.startswith("penstock.data.formats.") and name.count(".") > 3}
loaded = heavy & set(sys.modules) | readers
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
