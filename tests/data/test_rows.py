"""Rows of files: read in groups, in any order, in the type that all files have; what is held, and who unpacks it."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data import rows
from penstock.data.chunk_shuffle import SHUFFLE_BLOCK
from penstock.data.rows import ChunkCache, Column, RowFile, RowSource
from penstock.data.schema import Field


class Texts(RowSource):
    """Files whose groups are lists of numbers, each in one piece or in two; each has its number as text, too."""

    def __init__(self, files: Sequence[Sequence[Sequence[Any]]], dtypes: Sequence[str], **options: Any) -> None:
        self.files, self.unpacked = files, list[tuple[int, int]]()
        super().__init__(
            [
                RowFile(f"{number}.txt", {"x": Field("number", dtype), "t": Field("text")}, [*map(len, groups)])
                for number, (groups, dtype) in enumerate(zip(files, dtypes, strict=True))
            ],
            **options,
        )
        self.dtypes = dtypes

    def read_group(self, file: int, group: int, names: Sequence[str]) -> Iterator[tuple[int, list[Column], int]]:
        self.unpacked.append((file, group))
        values = self.files[file][group]
        for part in (values[:2], values[2:]):
            if "broken" in part:
                raise OSError("no")
            columns = {
                "x": Column(lambda wanted, part=part: numbers(self.dtypes[file], part, wanted), None in part),
                "t": Column(lambda wanted, part=part: np.array([f"t{one}" for one in part])[wanted].tolist()),
            }
            yield len(part), [columns[name] for name in names], 8 * len(part)


def numbers(dtype: str, values: Sequence[Any], wanted: Any) -> Any:
    if None not in values:
        return np.array(values, dtype)[wanted]
    return [None if one is None else np.dtype(dtype).type(one) for one in np.array(values, object)[wanted].tolist()]


FILES = [[[0, 1, 2], [], [3]], [[4, None, 6, 7]]]


def test_rows_are_the_same_alone_in_batches_in_order_and_in_another_process() -> None:
    source = Texts(FILES, ["int32", "float32"], null={"x": -1})
    expected = [(float(x), f"t{None if x < 0 else x}") for x in (0, 1, 2, 3, 4, -1, 6, 7)]
    order = [7, 0, 3, 5, 1, 2, 2]
    for made in (source, pickle.loads(pickle.dumps(source))):
        assert made.schema == {"x": Field("number", "float64"), "t": Field("text")}
        found = [*made], [made[index] for index in range(8)]
        assert [[(one["x"], one["t"]) for one in samples] for samples in found] == [expected] * 2
        assert {type(one["x"]) for samples in found for one in samples} == {np.float64}
        assert [one["x"] for one in made.__getitems__(order)] == [expected[index][0] for index in order]
        assert [one["t"] for one in made.stream()] == [text for _, text in expected]
        assert [*made.select_fields(["t"])] == [{"t": text} for _, text in expected]
    assert source.chunk_starts.tolist() == [0, 3, 4, 8]
    assert (source.path_of(3), source.path_of(4)) == ("0.txt", "1.txt")


def test_a_null_without_a_value_is_an_error_of_its_row_alone() -> None:
    source = Texts(FILES, ["int32", "int32"])
    with pytest.raises(RecordError, match=r"1\.txt: record 1: field 'x': it is null; pass a value"):
        source.__getitems__([4, 5])
    assert source[4]["x"] == 4
    with pytest.raises(OptionError, match=r"null=.'x': 0.5. does not fit the field, which is int32"):
        Texts(FILES, ["int32", "int32"], null={"x": 0.5})


@pytest.mark.parametrize(
    ("group", "options", "words"),
    [
        ([1, 2, "broken"], {}, "its group cannot be unpacked: no"),
        ([1, 2, 3], {"max_record_nbytes": 20}, "its group has 24 bytes and more unpacked; max_record_nbytes is 20"),
    ],
)
def test_a_group_that_cannot_be_unpacked_is_tried_once_and_the_others_are_read(
    group: list[Any], options: Any, words: str
) -> None:
    source = Texts([[[0], group], [[5]]], ["int64", "int64"], **options)
    for index in (1, 3):
        with pytest.raises(RecordError, match=rf"0\.txt: record {index}: {words}"):
            source[index]
    assert source.unpacked == [(0, 1)]
    assert [source[0]["x"], source[4]["x"]] == [0, 5]


def test_a_group_of_other_rows_than_its_file_states_is_refused() -> None:
    source = Texts([[[0, 1]]], ["int64"])
    source.files = [[[0]]]
    with pytest.raises(RecordError, match="its group has 1 rows, and 2 in the file's metadata"):
        source[0]
    with pytest.raises(SourceError, match=r"field 'x' of 1\.txt is float64, and that of 0\.txt int64"):
        Texts([[[0]], [[1]]], ["int64", "float64"])


def test_a_pass_in_order_keeps_one_group_and_a_shuffled_one_no_more_than_is_held() -> None:
    source = Texts([[[number, number] for number in range(50)]], ["int64"], held_nbytes=3 * 16)
    for number, sample in enumerate(source):
        assert sample["x"] == number // 2
        assert len(source._held.get()._held) == 1
    for index in range(0, 100, 2):
        assert source[index]["x"] == index // 2
        assert len(source._held.get()._held) <= 3


def test_as_many_are_held_as_a_reader_shuffles_together_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_SMALL_CACHE_NBYTES", 0)
    made: list[int] = []

    def get(held: ChunkCache[np.ndarray], number: int) -> None:
        held.get(number, lambda: made.append(number) or np.zeros(10, np.uint8))  # type: ignore[func-returns-value]

    held: ChunkCache[np.ndarray] = ChunkCache(10, 1 << 20)
    for number in (*range(2 * SHUFFLE_BLOCK), *range(2 * SHUFFLE_BLOCK), 99, 0, 1):
        get(held, number)
    assert made == [*range(2 * SHUFFLE_BLOCK), 99, 0, 1]


def test_bytes_are_bounded_but_the_last_chunk_is_held() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(1000, 100)
    first = held.get(1, lambda: np.zeros(1000, np.uint8))
    assert held.get(1, lambda: np.ones(1)) is first
    held.get(2, lambda: np.zeros(1000, np.uint8))
    assert held.get(1, lambda: np.ones(1)) is not first


def test_threads_wait_for_the_one_that_unpacks() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(8, 1 << 20)
    makers: list[int] = []

    def unpack() -> np.ndarray:
        makers.append(threading.get_ident())
        time.sleep(0.05)
        return np.zeros(1)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: held.get("a", unpack), range(8)))
    assert len(makers) == 1
    assert all(one is found[0] for one in found)


def test_who_comes_after_one_that_failed_tries_again() -> None:
    held: ChunkCache[np.ndarray] = ChunkCache(8, 1 << 20)

    def fail() -> np.ndarray:
        raise OSError("no")

    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            held.get("a", fail)
    assert held.get("a", lambda: np.ones(1)) == 1
