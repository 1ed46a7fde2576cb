"""CSV: rows in, samples out; quotes, types, and what is broken."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_files import assert_same, outcomes, write_samples, write_text
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.text import csv as csv_format
from penstock.data.formats.text.csv import CsvWriter, open_files, why_unsupported
from penstock.data.schema import Field, Selection, plain
from penstock.data.storage.storage import Storage

TEXT = st.text(st.one_of(st.sampled_from('",\n\r\t \ufeff12'), st.characters(exclude_categories=("Cs",))), max_size=8)
COLUMNS = {
    "text": TEXT,
    "int64": st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64),
    "float64": st.floats().map(np.float64),
    "bool": st.booleans().map(np.bool_),
}


def rows(*paths: Path, fields: Any = None, errors: Any = "raise", **options: Any) -> Any:
    return open_files(
        [str(path) for path in paths], storage=Storage(), fields=Selection.of(fields), errors=errors, **options
    )


@st.composite
def tables(draw: Any) -> tuple[dict[str, Field], list[dict[str, Any]]]:
    kinds = draw(st.dictionaries(TEXT, st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    schema = {name: Field("text") if kind == "text" else Field("number", kind) for name, kind in kinds.items()}
    made = draw(st.lists(st.fixed_dictionaries({name: COLUMNS[kind] for name, kind in kinds.items()}), max_size=8))
    return schema, made


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(table=tables(), suffix=st.sampled_from([".csv", ".tsv", ".csv.gz"]))
def test_what_was_written_comes_back(table: Any, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    schema, samples = table
    folder = tmp_path_factory.mktemp("csv")
    write_samples(folder / f"a{suffix}", samples, schema)
    assert why_unsupported(schema) == ""
    found = list(rows(folder / f"a{suffix}", dtypes={name: "text" for name in schema if schema[name].kind == "text"}))
    assert len(found) == len(samples)
    for one, other in zip(samples, found, strict=True):
        assert_same(one, {name: plain(value) for name, value in other.items()})


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(table=tables())
def test_pythons_csv_reads_what_was_written(table: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    schema, samples = table
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    write_samples(path, samples, schema)
    with open(path, newline="", encoding="utf-8") as file:
        header, *found = csv.reader(file, strict=True)
    assert header == list(schema)
    for sample, row in zip(samples, found, strict=True):
        for (name, field), value in zip(schema.items(), row, strict=True):
            if field.kind == "text":
                assert value == sample[name]
            elif field.dtype != "bool":
                assert np.array_equal(float(value), float(sample[name]), equal_nan=True)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    table=st.lists(st.lists(TEXT, min_size=2, max_size=2).filter(any), max_size=6),
    terminator=st.sampled_from(["\n", "\r\n"]),
    piece=st.integers(1, 40),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    first=st.integers(0, 4),
    step=st.integers(1, 3),
)
def test_what_pythons_csv_writes_is_read(
    table: Any, terminator: str, piece: int, quoting: int, first: int, step: int, tmp_path_factory: Any
) -> None:
    table = [["x" + one, two] for one, two in table]
    held = io.StringIO()
    writer = csv.writer(held, lineterminator=terminator, quoting=quoting)
    writer.writerows([["a", "b"], *table])
    text = held.getvalue()
    if quoting == csv.QUOTE_MINIMAL:  # it puts no quotes about a carriage return
        table = [row for row in table if not any("\r" in value for value in row)]
        held = io.StringIO()
        csv.writer(held, lineterminator=terminator, quoting=quoting).writerows([["a", "b"], *table])
        text = held.getvalue()
    path = write_text(tmp_path_factory.mktemp("csv") / "a.csv", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_format, "READ_NBYTES", piece)
        stream = rows(path, dtypes={"a": "text", "b": "text"})
        found = [[sample["a"], sample["b"]] for sample in stream.read(stream.shards[0], first, step)]
    assert found == table[first::step]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    table=st.lists(st.tuples(TEXT, TEXT, st.sampled_from(["\n", "\r", "\r\n"])), min_size=1, max_size=6),
    piece=st.integers(1, 40),
    is_ended=st.booleans(),
)
def test_lines_end_where_pythons_csv_ends_them(table: Any, piece: int, is_ended: bool, tmp_path_factory: Any) -> None:
    text = "".join(_row(one, two) + end for one, two, end in table)
    text = "a,b\r" + (text if is_ended else text.rstrip("\r\n"))
    path = write_text(tmp_path_factory.mktemp("csv") / "a.csv", text)
    with open(path, newline="", encoding="utf-8") as file:
        expected = list(csv.reader(file, strict=True))[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_format, "READ_NBYTES", piece)
        found = [[sample["a"], sample["b"]] for sample in rows(path, dtypes={"a": "text", "b": "text"})]
    assert found == expected


def _row(bare: str, quoted: str) -> str:
    return "x" + "".join(set(bare) - set('",\r\n')) + ',"' + quoted.replace('"', '""') + '"'


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_text_in_utf_16_is_named_as_such(tmp_path: Path, suffix: str, encoding: str) -> None:
    path = write_text(tmp_path / f"a.{suffix}", "a,b\n1,2\n".encode(encoding))
    with pytest.raises(SourceError, match=r"a\.\w+ is text in UTF-16, and UTF-8 is read"):
        list(penstock.open(path))


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
def test_rows_may_end_as_on_any_system(tmp_path: Path, end: str) -> None:
    path = write_text(tmp_path / "a.csv", end.join(["a,b", "1,x", "2,y\r3,z"]) + end)
    assert list(rows(path)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": "z"}]


@pytest.mark.parametrize("value", ["1_000", "٣", "1_0.5", "٣.٥", "0x1F", "abc", ""])
def test_a_column_is_what_all_its_values_are(tmp_path: Path, value: str) -> None:
    path = write_text(tmp_path / "a.csv", "n,t\n" + "1,a_b\n" * 20_000 + f"{value},ü\n")
    found = [sample["n"] for sample in rows(path)]
    if value:
        assert found == ["1"] * 20_000 + [value]
    else:
        assert found[:-1] == [1.0] * 20_000
        assert math.isnan(found[-1])


def test_what_is_not_looked_at_and_is_of_another_type_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_format, "_LOOKED_AT_NBYTES", 1)
    monkeypatch.setattr(csv_format, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(csv_format, "READ_NBYTES", 4)
    path = write_text(tmp_path / "a.csv", "n\n1\n2\n3.5\n4\n")
    assert [str(one) for one in outcomes(rows(path)) if isinstance(one, RecordError)] == [
        f"{path}: record row 3: column 'n' has '3.5', which is no int64 (Failed to parse string: '3.5' as a scalar of "
        "type int64); dtypes= sets another"
    ]
    assert [sample["n"] for sample in rows(path, dtypes={"n": "float64"})] == [1, 2, 3.5, 4]


def test_types_are_told_from_the_values(tmp_path: Path) -> None:
    text = 'i,f,e,b,t,q,big,id\n1,1.5,,true,x,"1",99999999999999999999,007\n-2,1e3,2,False,1,"2",1,008\n'
    first, second = rows(write_text(tmp_path / "a.csv", text))
    assert first == {"i": 1, "f": 1.5, "e": first["e"], "b": True, "t": "x", "q": 1, "big": "9" * 20, "id": 7}
    assert math.isnan(first["e"])
    assert [type(value) for value in second.values()] == [int, float, float, bool, str, int, str, int]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "a;b\n1;2,5\n2;3,5\n"),
        ("a.csv", "a|b\n1|2,5\n2|3,5\n"),
        ("a.csv", "a\tb\n1\t2,5\n2\t3,5\n"),
        ("a.tsv", "a\tb\n1\t2,5\n2\t3,5\n"),
        ("a.tsv", "a,b\n1,2;5\n2,3;5\n"),
        ("a.csv", 'a,b\n1,"2;5|6"\n2,"3;5|7"\n'),
    ],
)
def test_the_delimiter_is_that_of_the_first_rows(tmp_path: Path, name: str, text: str) -> None:
    stream = rows(write_text(tmp_path / name, text))
    assert [sample["a"] for sample in stream] == [1, 2]
    assert [[*sample] for sample in stream] == [["a", "b"]] * 2


def test_quoting_can_be_turned_off(tmp_path: Path) -> None:
    path = write_text(tmp_path / "metadata.csv", 'LJ1|Printing, in "the|x\nLJ2|"only sense|y\n')
    assert [*rows(path, header=["id", "text", "end"], quoting=False)] == [
        {"id": "LJ1", "text": 'Printing, in "the', "end": "x"},
        {"id": "LJ2", "text": '"only sense', "end": "y"},
    ]


@pytest.mark.parametrize(("value", "kind"), [("70000", "float16"), ("1e39", "float32"), ("300", "int8")])
def test_a_value_that_its_dtype_does_not_hold_is_refused(tmp_path: Path, value: str, kind: str) -> None:
    good, bad = outcomes(rows(write_text(tmp_path / "a.csv", f"n\n1\n{value}\n"), dtypes={"n": kind}))
    assert good == {"n": 1}
    assert f"row 2: column 'n' has '{value}', which is no {kind}" in str(bad)


def test_dtypes_fields_header_and_delimiter(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", "1;2.5;007\n3;;008\n")
    options = {"header": ["x", "y", "z"], "delimiter": ";", "dtypes": {"x": "uint8", "y": "float32", "z": "text"}}
    first, second = rows(path, fields={"a": "x", "b": "y", "c": "z"}, **options)
    assert first == {"a": np.uint8(1), "b": np.float32(2.5), "c": "007"}
    assert [type(value) for value in second.values()] == [np.uint8, np.float32, str]
    with pytest.raises(SourceError, match="no column 'w'"):
        rows(path, **{**options, "dtypes": {"w": "text"}})
    with pytest.raises(OptionError, match="dtypes"):
        rows(path, **{**options, "dtypes": {"x": "object"}})
    with pytest.raises(OptionError, match="delimiter"):
        rows(path, delimiter="||")
    with pytest.raises(SourceError, match="no field 'w'"):
        rows(path, fields=["w"], **options)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"1", "it has 1 values, the header 2"),
        (b"1,2,3", "it has 3 values, the header 2"),
        (b"1.5,x", "column 'a' has '1.5', which is no int64"),
        (b"99999999999999999999,x", "no int64"),
        (b"1,\xff", "column 'b' has '\ufffd', which is no text (Invalid UTF8"),
        (b'"1,\xff"', "it has 1 values, the header 2"),
    ],
)
def test_a_broken_row_is_told_and_the_next_is_read(tmp_path: Path, row: bytes, reason: str) -> None:
    path = write_text(tmp_path / "a.csv", b'a,b\n1,"x\ny"\n\n' + row + b"\n2,z\n")
    first, broken, last = outcomes(rows(path, dtypes={"a": "int64"}))
    assert (first, last) == ({"a": 1, "b": "x\ny"}, {"a": 2, "b": "z"})
    assert reason in str(broken)
    assert broken.key == "row 2"


def test_a_quote_that_is_not_closed_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_format, "READ_NBYTES", 8)
    path = write_text(tmp_path / "a.csv", 'a,b\n1,x\n2,"y\n' + "3,z\n" * 1000)
    found = outcomes(rows(path, max_record_nbytes=50))
    assert found[0] == {"a": 1, "b": "x"}
    assert "longer than max_record_nbytes=50; perhaps a quote is not closed" in str(found[1])
    assert len(found) == 2


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_quote_within_a_value_is_a_character(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_format, "READ_NBYTES", piece)
    path = write_text(tmp_path / "a.csv", 'a,b\n5" pipe,1\n6,2\n7" x,3\n8,"a\nb"\n')
    assert [sample["a"] for sample in rows(path)] == ['5" pipe', "6", '7" x', "8"]


def test_files_have_to_have_one_header(tmp_path: Path) -> None:
    paths = [write_text(tmp_path / "a.csv", "a,b\n1,2\n"), write_text(tmp_path / "b.csv", "b,a\n1,2\n")]
    stream = rows(*paths, errors="skip")
    with pytest.warns(UserWarning, match="its columns are"):
        assert list(stream) == [{"a": 1, "b": 2}]
    with pytest.raises(SourceError, match="empty"):
        rows(write_text(tmp_path / "c.csv", ""))
    with pytest.raises(SourceError, match="2 columns 'a'"):
        rows(write_text(tmp_path / "c.csv", "a,b,a\n"))
    with pytest.raises(SourceError, match="header cannot be read"):
        rows(write_text(tmp_path / "c.csv", b"\xff\n1\n"))
    assert list(rows(write_text(tmp_path / "c.csv", "a,b\n"))) == []


def write_set(folder: Path, *texts: str) -> list[Path]:
    return [write_text(folder / f"{number}.csv", text) for number, text in enumerate(texts)]


def test_columns_have_the_types_of_the_first_file_with_rows(tmp_path: Path) -> None:
    found = [*rows(*write_set(tmp_path, "a,b,c\n", "a,b,c\n1,2.5,true\n", "a,b,c\n"))]
    assert found == [{"a": 1, "b": 2.5, "c": True}]
    paths = write_set(tmp_path, *["a\n"] * 20, "a\n7\n")
    assert [*rows(*paths)] == [{"a": 7}]


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (("a,b\n1,x\n", "a,b\n1.5,x\n"), [1.0, 1.5]),
        (("a,b\n1.5,x\n", "a,b\n1,x\n"), [1.5, 1.0]),
        (("a,b\n1,x\n", "a,b\n,x\n"), [1.0, math.nan]),
        (("a,b\n,x\n", "a,b\n1,x\n"), [math.nan, 1.0]),
        (("a,b\ntrue,x\n", "a,b\n,x\n"), ["true", ""]),
        (('a,b\n"1",x\n', "a,b\n2,x\n"), [1, 2]),
        (("a,b\n1,x\n", "a,b\ny,x\n"), ["1", "y"]),
        (("a,b\n,x\n", "a,b\n,x\n"), ["", ""]),
        (("a,b\n9007199254740993,x\n", "a,b\n,x\n"), "0.csv: column 'a' has 9007199254740993, which float64"),
        (("a,b\n1.5,x\n", "a,b\n9007199254740993,x\n"), "1.csv: column 'a' has 9007199254740993, which float64"),
    ],
)
def test_files_of_one_set_have_a_type_that_holds_the_numbers_of_all(
    tmp_path: Path, texts: tuple[str, ...], values: Any
) -> None:
    paths = write_set(tmp_path, *texts)
    if isinstance(values, str):
        with pytest.raises(SourceError, match=values):
            rows(*paths)
        assert [*rows(*paths, fields=["b"])] == [{"b": "x"}] * 2
        assert {type(sample["a"]) for sample in rows(*paths, dtypes={"a": "text"})} == {str}
        return
    found = [sample["a"] for sample in rows(*paths)]
    assert str(found) == str(values)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_file_of_a_set_has_no_rows(tmp_path: Path, place: int) -> None:
    texts = ["a,b\n1,2\n", "a,b\n3,4\n"]
    texts.insert(place, ["", "\n", "\ufeff"][place])
    paths = write_set(tmp_path, *texts)
    assert [*rows(*paths)] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    with pytest.raises(SourceError, match="empty, and so are the others"):
        rows(*write_set(tmp_path, "", ""))


def test_a_file_that_cannot_be_read_is_looked_past_for_types(tmp_path: Path) -> None:
    paths = [*write_set(tmp_path, "a\n1\n"), tmp_path / "gone.csv", write_text(tmp_path / "2.csv", "a\n1.5\n")]
    with pytest.warns(UserWarning, match="gone.csv"):
        assert [*rows(*paths, errors="skip")] == [{"a": 1.0}, {"a": 1.5}]


def test_what_csv_cannot_hold_is_said(tmp_path: Path) -> None:
    assert "array" not in why_unsupported({"x": Field("number", "float64")})
    assert "float32[3]" in why_unsupported({"x": Field("array", "float32", (3,))})
    assert "comes back" in why_unsupported({"x": Field("number", "int8")})
    assert "no fields" in why_unsupported({})
    with pytest.raises(SourceError, match="numbers and text only"):
        CsvWriter(str(tmp_path / "a.csv"), {"x": Field("bytes")})
    writer = CsvWriter(str(tmp_path / "a.csv"), {"x": Field("number", "int64")})
    with pytest.raises(SourceError):
        writer.write({"x": 1.5})
    writer.close()


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
def test_workers_share_out_the_rows(tmp_path: Path, loader: Any) -> None:
    write_text(tmp_path / "a.tsv", "x\ty\n" + "".join(f'{number}\t"a\n{number}"\n' for number in range(50)))
    batches = list(loader(penstock.open(str(tmp_path / "*.tsv")), batch_size=4, num_workers=3))
    assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(50))
