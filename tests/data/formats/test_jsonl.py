"""JSONL: lines in, samples out; whatever a line holds."""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.json
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_files import outcomes, write_samples, write_text
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.text import jsonl as json_objects
from penstock.data.formats.text import lines as lines_module
from penstock.data.formats.text.jsonl import JsonLinesWriter, open_files
from penstock.data.schema import Field, Selection
from penstock.data.storage.storage import Storage


def jsonl(*paths: Path, fields: Any = None, errors: Any = "raise", **options: Any) -> Any:
    return open_files(
        [str(path) for path in paths], storage=Storage(), fields=Selection.of(fields), errors=errors, **options
    )


def test_lines_are_json_to_the_letter(tmp_path: Path) -> None:
    sample = {"x": np.float64("nan"), "y": np.array([1.0, np.inf]), "z": np.arange(3), "t": "a\nb\u2028"}
    (line,) = write_samples(tmp_path / "a.jsonl", [sample]).read_bytes().splitlines()

    def refused(word: str) -> Any:
        raise AssertionError(word)

    found = json.loads(line, parse_constant=refused)
    assert found["z"] == [0, 1, 2]
    assert found["x"]["dtype"] == "float64"


def test_pyarrow_reads_what_was_written(tmp_path: Path) -> None:
    samples = [{"i": n, "f": n / 7, "b": n % 2 == 0, "t": f"ü\n{n}", "l": np.arange(n + 1)} for n in range(5)]
    table = pyarrow.json.read_json(write_samples(tmp_path / "a.jsonl", samples))
    assert table.to_pylist() == [{**sample, "l": sample["l"].tolist()} for sample in samples]


def test_members_are_fields(tmp_path: Path) -> None:
    path = write_text(
        tmp_path / "a.jsonl",
        '{"i": 1, "f": 0.5, "b": true, "t": "ü", "n": null, "l": [1, 2], "m": [[1.5, 2], [3, 4]], "o": {"p": {"q": 7}},'
        ' "texts": ["a", "b"], "ragged": [[1], [2, 3]], "mixed": [1, "a"],'
        ' "objects": [{"a": [{}]}], "none": [], "u": [18446744073709551615]}\n',
    )
    (sample,) = jsonl(path)
    assert {name: value for name, value in sample.items() if not isinstance(value, np.ndarray)} == {
        "i": 1,
        "f": 0.5,
        "b": True,
        "t": "ü",
        "n": None,
        "o/p/q": 7,
        "texts": ["a", "b"],
        "ragged": [[1], [2, 3]],
        "mixed": [1, "a"],
        "objects": [{"a": [{}]}],
    }
    assert [sample[name].dtype.name for name in "lmu"] == ["int64", "float64", "uint64"]
    assert sample["m"].tolist() == [[1.5, 2.0], [3.0, 4.0]]
    assert sample["none"].shape == (0,)


def test_dtypes_are_taken_and_checked(tmp_path: Path) -> None:
    path = write_text(
        tmp_path / "a.jsonl", '{"x": [1, 2], "y": 3}\n{"x": [], "y": 4}\n{"x": [300], "y": 4}\n{"x": [1.5], "y": 1}\n'
    )
    found = outcomes(jsonl(path, dtypes={"x": "uint8", "y": "float32"}))
    assert [sample["x"].dtype.name for sample in found[:2]] == ["uint8", "uint8"]
    assert type(found[0]["y"]) is np.float32
    assert [type(one) for one in found[2:]] == [RecordError, RecordError]
    with pytest.raises(OptionError, match="dtypes"):
        jsonl(path, dtypes={"x": "object"})


@pytest.mark.parametrize(
    ("value", "dtype", "reason"),
    [
        ("1.5", "int32", "it is 1.5, which does not fit into int32"),
        ("300", "uint8", "it is 300, which does not fit into uint8"),
        ("2", "bool", "it is 2, which does not fit into bool"),
        ("18446744073709551615", "int8", "it is 18446744073709551615, which does not fit into int8"),
        ("[1.5]", "int32", "a list holds numbers that do not fit into int32"),
        ("[0, 2]", "bool", "a list holds numbers that do not fit into bool"),
        ("NaN", "int8", "it is nan, which does not fit into int8"),
        ("[1, NaN]", "int8", "a list holds numbers that do not fit into int8"),
        ("[300]", "uint8", "a list holds numbers that do not fit into uint8"),
        ("70000", "float16", "it is 70000, which does not fit into float16"),
        ("[1.5, 70000]", "float16", "a list holds numbers that do not fit into float16"),
        ("1e39", "float32", "it is 1e+39, which does not fit into float32"),
    ],
)
def test_a_number_that_does_not_fit_its_dtype_is_refused_with_its_field(
    tmp_path: Path, value: str, dtype: str, reason: str
) -> None:
    path = write_text(tmp_path / "a.jsonl", f'{{"a": {{"x": {value}}}}}\n')
    (broken,) = outcomes(jsonl(path, dtypes={"a/x": dtype}))
    assert f"field 'a/x': {reason}" in str(broken)


def test_dtypes_hold_for_integers_of_64_bits_and_bits(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.jsonl", '{"x": 18446744073709551615, "y": [0, 1, true], "z": 1}\n')
    (found,) = jsonl(path, dtypes={"x": "float64", "y": "bool", "z": "bool"})
    assert (found["x"], found["x"].dtype.name) == (2.0**64, "float64")
    assert (found["y"].tolist(), found["y"].dtype.name, bool(found["z"])) == ([False, True, True], "bool", True)


@pytest.mark.parametrize("index", [False, True])
def test_a_schema_names_the_field_that_is_null(tmp_path: Path, index: bool) -> None:
    path = write_text(tmp_path / "a.jsonl", '{"x": 1, "note": null}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl: field 'note': it holds None; .*fields="):
        _ = jsonl(path, index=index).schema
    assert jsonl(path, index=index, fields=["x"]).schema == {"x": Field("number", "int64")}


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
def test_dtypes_decide_what_a_batch_of_integers_and_fractions_is(tmp_path: Path, loader: Any) -> None:
    lines = "".join(f'{{"x": {value}}}\n' for value in ("1", "16777217.25", "0.5", "2", "7", "8"))
    path = write_text(tmp_path / "a.jsonl", lines)
    whole = [batch["x"] for batch in loader(jsonl(path, dtypes={"x": "float64"}), batch_size=2)]
    assert [batch.dtype for batch in whole] == [torch.float64] * 3
    assert torch.cat(whole).tolist() == [1.0, 16777217.25, 0.5, 2.0, 7.0, 8.0]


def test_fields_are_chosen_and_renamed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.jsonl", '{"a": 1, "b": {"c": 2}}\n{"a": 3}\n')
    found = outcomes(jsonl(path, fields={"x": "b/c"}))
    assert found[0] == {"x": 2}
    assert "has no field 'b/c'" in str(found[1])


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blank_lines_marks_and_carriage_returns_are_no_matter(tmp_path: Path, suffix: str) -> None:
    text = b'\xef\xbb\xbf\r\n\n{"x": 1}\r\n  \t \n\n{"x": 2}\n{"x": 3}'
    path = write_text(tmp_path / f"a{suffix}", text)
    assert [sample["x"] for sample in jsonl(path)] == [1, 2, 3]
    if suffix == ".jsonl":
        source = jsonl(path, index=True)
        assert [source[number]["x"] for number in range(len(source))] == [1, 2, 3]
        source.close()
        assert [
            len(jsonl(write_text(tmp_path / "b.jsonl", rest), index=True)) for rest in (b"", b"\n", b"\xef\xbb\xbf")
        ] == [0] * 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"x": 1', "Expecting"),
        (b'{"x": 1} 2', "Extra data"),
        (b"[1, 2]", "a list, not an object"),
        (b"3", "a number, not an object"),
        (b'{"b": 0, "b": 1, "c": }', "Expecting value"),
        (b'{"x": [9007199254740993, 1.5]}', "an integer that float64 does not hold"),
        (b'{"x": [1.5, 9007199254740993]}', "an integer that float64 does not hold"),
        (b'{"x": [[0.5, 1], [1.5, 9007199254740993]]}', "an integer that float64 does not hold"),
        (b'{"x": "\xff"}', "utf-8"),
        (b'{"x": "\\ud800"}', "surrogates"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
        (b'{"x": ' * 100_000 + b"1" + b"}" * 100_000, "too deep"),
        (b'{"x": 1' + b"0" * 30 + b"}", "does not fit into 64 bits"),
        (b'{"x": [1' + b"0" * 30 + b"]}", "64 bits"),
        (b'{"x": [-1, 18446744073709551615]}', "64 bits"),
        (b'{"x": 1' + b"0" * 5000 + b"}", "Exceeds the limit"),
        (b'{"x": {"base64": "!"}}', "cannot be decoded"),
        (b'{"x": {"base64": 3}}', "cannot be decoded"),
        (b'{"x": {"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}}', "dtype"),
        (b'{"x": {"dtype": "int8", "shape": [-1], "base64": ""}}', "shape"),
        (b'{"x": {"dtype": "int8", "shape": [1000000000000], "base64": "AA=="}}', "1 bytes"),
    ],
)
def test_a_broken_line_is_told_and_the_next_is_read(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write_text(tmp_path / "a.jsonl", b'{"x": 1}\n\n' + line + b'\n{"x": 2}\n')
    first, broken, last = outcomes(jsonl(path))
    assert (first, last) == ({"x": 1}, {"x": 2})
    assert reason in str(broken)
    assert (broken.path, broken.offset, broken.key) == (str(path), 10, "line 3")
    source = jsonl(path, index=True)
    with pytest.raises(RecordError, match="record 1 at byte 10"):
        source[1]
    assert source[2] == {"x": 2}
    source.close()


def _typed(value: Any) -> Any:
    """Return a value such that what differs in a type, a sign or NaN differs."""
    if type(value) is dict:
        return {name: _typed(one) for name, one in value.items()}
    return [*map(_typed, value)] if type(value) is list else (type(value), repr(value))


_NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str),
    st.floats(allow_nan=True).map(json.dumps),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
_TEXTS = st.text(st.sampled_from('ab:":\\é😀\u2028 '), max_size=6).flatmap(
    lambda text: st.sampled_from([json.dumps(text), json.dumps(text, ensure_ascii=False)])
)
_SPACES = st.sampled_from(["", "", " ", "\t "])


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.builds("{}{}:{}{}".format, _TEXTS, _SPACES, _SPACES, values)
    return st.lists(members, max_size=4).map(lambda found: "{" + ", ".join(found) + "}")


_VALUES = st.recursive(
    _NUMBERS | _TEXTS | st.sampled_from(["true", "null", "[]", "{}", '"\\ud800"', "01", "nan"]),
    lambda values: st.lists(values, max_size=4).map(lambda found: "[" + ",".join(found) + "]") | _objects(values),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(text=_objects(_VALUES) | _VALUES, cut=st.none() | st.integers(0, 40))
def test_a_text_is_read_by_orjson_as_by_json(text: str, cut: int | None) -> None:
    orjson = pytest.importorskip("orjson")
    line = text.encode()[:cut]
    with pytest.MonkeyPatch.context() as patch:
        found = _parsed(line)
        patch.setattr(json_objects, "_orjson", None)
        expected = _parsed(line)
    assert orjson is json_objects._orjson
    assert _typed(found) == _typed(expected)


def _parsed(line: bytes) -> Any:
    try:
        return json_objects.parse_json(line)
    except (ValueError, RecursionError):
        return ValueError


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".zst"])
def test_a_list_of_objects_and_packed_lines_are_read(tmp_path: Path, packed: str) -> None:

    pack: dict[str, Any] = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": lambda data: pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True),
    }
    samples = [{"x": number, "y": [number, 2]} for number in range(5)]
    for text in (json.dumps(samples), json.dumps(samples, indent=1), "\n".join(map(json.dumps, samples))):
        path = tmp_path / f"a.json{packed}"
        path.write_bytes(pack[packed](text.encode()))
        stream = penstock.open(path)
        assert [sample["x"] for sample in stream] == [*range(5)]
        assert [sample["x"] for sample in stream.read(stream.shards[0], 1, 2)] == [1, 3]


def test_a_list_that_is_broken_too_long_or_holds_no_objects_is_told(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.json", b'[{"x": 1}, 2, {"x": 3}]')
    first, broken, last = outcomes(jsonl(path))
    assert (first, last) == ({"x": 1}, {"x": 3})
    assert "object 1 at byte 0: it holds a number, not an object" in str(broken)
    assert "max_record_nbytes=9" in str(outcomes(jsonl(path, max_record_nbytes=9))[0])
    assert "list at byte 0" in str(outcomes(jsonl(write_text(tmp_path / "b.json", b'[{"x": 1}')))[0])
    with pytest.raises(OptionError, match="is one list of objects, and index= needs plain lines"):
        jsonl(path, index=True)


def test_an_orjson_that_deep_lists_crash_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    orjson = pytest.importorskip("orjson")
    monkeypatch.setattr(orjson, "__version__", "3.9.14")
    assert json_objects._usable_orjson() is None
    monkeypatch.setattr(orjson, "__version__", "3.9.15")
    assert json_objects._usable_orjson() is orjson


def test_without_orjson_lines_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_objects, "_orjson", None)
    (sample,) = jsonl(write_text(tmp_path / "a.jsonl", '{"x": 1, "y": {"z": "a"}}'))
    assert sample == {"x": 1, "y/z": "a"}


def test_pairs_of_surrogates_are_text(tmp_path: Path) -> None:
    (sample,) = jsonl(write_text(tmp_path / "a.jsonl", r'{"x": "\ud83d\ude00"}'))
    assert sample["x"] == "😀"


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_a_line_that_is_too_long_is_bounded(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "READ_NBYTES", piece)
    path = write_text(tmp_path / "a.jsonl", '{"x": 1}\n{"x": "' + "a" * 1000 + '"}\n{"x": 2}\n')
    found = outcomes(jsonl(path, max_record_nbytes=20))
    assert (found[0], found[2], len(found)) == ({"x": 1}, {"x": 2}, 3)
    assert "longer than max_record_nbytes=20" in str(found[1])
    assert found[1].offset == 9
    source = jsonl(path, index=True, max_record_nbytes=20)
    with pytest.raises(RecordError, match="longer than"):
        source[1]
    source.close()


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(0, 30),
    blank=st.sets(st.integers(0, 29)),
    first=st.integers(0, 35),
    step=st.integers(1, 5),
    piece=st.integers(1, 60),
    packed=st.booleans(),
)
def test_passing_over_lines_counts_the_same_ones(
    count: int, blank: set[int], first: int, step: int, piece: int, packed: bool, tmp_path_factory: Any
) -> None:
    text = "".join(f'{{"x": {number}}}\n' + "\n" * (number in blank) for number in range(count))
    path = write_text(tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if packed else "a.jsonl"), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "READ_NBYTES", piece)
        stream = jsonl(path)
        assert [sample["x"] for sample in stream.read(stream.shards[0], first, step)] == list(range(first, count, step))
        if not packed:
            source = jsonl(path, index=True)
            assert [source[number]["x"] for number in range(len(source))] == list(range(count))
            source.close()


@pytest.mark.slow
def test_a_truncated_gzip_file_gives_what_it_has(tmp_path: Path) -> None:
    text = "".join(f'{{"x": {number}, "y": {random.randrange(10**9)}}}\n' for number in range(30_000))
    whole = gzip.compress(text.encode(), 1)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    found = outcomes(jsonl(path))
    assert [sample["x"] for sample in found[:-1]] == list(range(len(found) - 1))
    assert "they end early" in str(found[-1])
    path.write_bytes(whole + whole + b"\0" * 100)
    assert sum(1 for _ in jsonl(path)) == 60_000
    with pytest.raises(OptionError, match="gzip"):
        jsonl(path, index=True)
    with pytest.raises(SourceError, match="cannot be read"):
        jsonl(tmp_path, index=True)


def test_a_sample_of_another_schema_is_refused(tmp_path: Path) -> None:
    writer = JsonLinesWriter(str(tmp_path / "a.jsonl"), {"x": Field("array", "int64", (3,))})
    for wrong in ({"x": np.zeros(3)}, {"x": np.zeros(4, np.int64)}, {"y": np.zeros(3, np.int64)}):
        with pytest.raises(SourceError):
            writer.write(wrong)
    writer.close()


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
@pytest.mark.parametrize("index", [False, True])
def test_loaders_give_every_line_once(tmp_path: Path, loader: Any, index: bool) -> None:
    paths = [write_text(tmp_path / f"{number}.jsonl", f'{{"x": [{number}]}}\n' * (number + 5)) for number in range(3)]
    source = penstock.open(str(tmp_path), index=index)
    found = [number for batch in loader(source, batch_size=4, num_workers=2) for number in batch["x"].ravel().tolist()]
    assert sorted(found) == [0] * 5 + [1] * 6 + [2] * 7
    assert len(paths) == 3
    source.close()


def test_an_index_travels_without_its_files(tmp_path: Path) -> None:
    source = jsonl(write_text(tmp_path / "a.jsonl", '{"x": 1}\n{"x": 2}\n'), index=True)
    assert source[1] == {"x": 2}
    other = pickle.loads(pickle.dumps(source))
    assert other[0] == {"x": 1}
    (tmp_path / "a.jsonl").write_bytes(b"{")
    with pytest.raises(RecordError, match="too early"):
        other[1]
    source.close()
    other.close()


def test_a_long_name_of_an_object_is_not_repeated_for_each_of_very_many_members(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    short = '{"a":{"b":1,"c":{"d":2}}}'
    members = ",".join(f'"{number:x}":1' for number in range(10_000))
    parts = ",".join(f'"{number}{"k" * 1000}":{{{members[:5000].rpartition(",")[0]}}}' for number in range(40))
    path.write_text(f'{short}\n{{"{"k" * 100_000}":{{{members}}}}}\n{{{parts}}}\n')
    tracemalloc.start()
    found = outcomes(jsonl(path, max_record_nbytes=1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert found[0] == {"a/b": 1, "a/c/d": 2}
    assert ["names are longer than max_record_nbytes=1048576" in str(one) for one in found[1:]] == [True, True]


def test_a_line_that_may_take_more_than_a_gibibyte_is_broken_by_default(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":[' + b"[]," * (11 << 20) + b"1]}\n" + b'{"a":1}\n')
    found = outcomes(jsonl(path))
    assert "it is longer than max_record_nbytes=33554432" in str(found[0])
    assert found[1] == {"a": 1}
