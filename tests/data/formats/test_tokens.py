"""Token files: windows, documents, packed sequences; no token twice, none lost that is not said to be."""

from __future__ import annotations

import itertools
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sample_files import assert_same
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.tokens.packing import pack_documents
from penstock.data.formats.tokens.source import IGNORED, TokenWriter, open_files, why_unsupported
from penstock.data.schema import Field, Selection
from penstock.data.storage.storage import Storage

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
SIZES = st.lists(st.integers(0, 12), max_size=12)


def tokens(*paths: Path, fields: Any = None, **options: Any) -> Any:
    names = [str(path) for path in paths]
    if paths[0].suffix == ".bin":
        options.setdefault("dtype", "uint16")
    return open_files(names, storage=Storage(), fields=Selection.of(fields), errors="raise", **options)


def saved(path: Path, values: Any, dtype: str = "uint16") -> Path:
    array = np.asarray(values, dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


def written(path: Path, documents: list[Any], dtype: str = "uint16") -> Path:
    writer = TokenWriter(str(path), {"tokens": Field("array", dtype, (None,))})
    for document in documents:
        writer.write({"tokens": np.asarray(document, dtype)})
    writer.close()
    return path


def everything(source: Any) -> list[Any]:
    found = [source[number] for number in range(len(source))]
    source.close()
    return found


def chained(lists: Any) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def counted(sizes: list[int]) -> list[list[int]]:
    """Return documents of these sizes that count up, from 1."""
    ends = np.cumsum([1, *sizes]).tolist()
    return [list(range(start, end)) for start, end in itertools.pairwise(ends)]


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    length=st.integers(1, 8),
    step=st.one_of(st.none(), st.integers(1, 9)),
    targets=st.booleans(),
)
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_windows_go_over_all_files(
    counts: list[int], length: int, step: int | None, targets: bool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    row = list(range(sum(counts)))
    assume(not row or len(row) >= length + targets)
    ends = np.cumsum([0, *counts]).tolist()
    paths = [
        saved(folder / f"{number}.{'npy' if number % 2 else 'bin'}", row[ends[number] : ends[number + 1]])
        for number in range(len(counts))
    ]
    found = everything(tokens(*paths, length=length, step=step, targets=targets))
    starts = range(0, len(row) - length - targets + 1, step or length)
    assert [sample["tokens"].tolist() for sample in found] == [row[start : start + length] for start in starts]
    if targets:
        assert [sample["targets"].tolist() for sample in found] == [
            row[start + 1 : start + length + 1] for start in starts
        ]
    assert all(sample["tokens"].flags.writeable and sample["tokens"].dtype == np.uint16 for sample in found)


def test_fewer_tokens_than_a_window_takes_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", range(8))
    with pytest.raises(SourceError, match=r"8 tokens in all, and a window takes 9; choose a smaller length="):
        tokens(path, length=8, targets=True)
    assert len(everything(tokens(path, length=8))) == 1
    assert len(everything(tokens(path, length=9, pack=False))) == 1


@pytest.mark.parametrize("length", [None, 4])
def test_without_documents_and_windows_every_token_comes_once(tmp_path: Path, length: int | None) -> None:
    paths = [saved(tmp_path / f"{number}.bin", range(number * 10, number * 10 + 10)) for number in range(2)]
    found = everything(tokens(*paths, length=length, pack=False))
    assert [token for sample in found for token in sample["tokens"].tolist()] == list(range(20))
    assert [len(sample["tokens"]) for sample in found] == ([10, 10] if length is None else [4, 4, 2, 4, 4, 2])


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), dtype=st.sampled_from(INTEGERS), cut=st.integers(0, 8))
def test_what_was_written_comes_back(data: Any, dtype: str, cut: int, tmp_path_factory: Any) -> None:
    limits = np.iinfo(dtype)
    value = st.integers(int(limits.min), int(limits.max))
    documents = [np.array(one, dtype) for one in data.draw(st.lists(st.lists(value, max_size=5), max_size=8))]
    folder = tmp_path_factory.mktemp("tokens")
    assert why_unsupported({"tokens": Field("array", dtype, (None,))}) == ""
    parts = [
        written(folder / f"{number}.npy", own, dtype) for number, own in enumerate((documents[:cut], documents[cut:]))
    ]
    found = everything(tokens(*parts))
    assert len(found) == len(documents)
    for one, other in zip(documents, found, strict=True):
        assert_same({"tokens": one}, other)
    assert np.array_equal(np.load(parts[0]), np.concatenate([np.zeros(0, dtype), *documents[:cut]]))


def test_bare_files_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"does not store what its integers are; write \.npy"):
        written(tmp_path / "b.bin", [])


@given(sizes=SIZES, length=st.integers(1, 9), targets=st.booleans())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_cut_documents_keep_every_token(sizes: list[int], length: int, targets: bool, tmp_path_factory: Any) -> None:
    documents = counted(sizes)
    path = written(tmp_path_factory.mktemp("tokens") / "a.npy", documents)
    source = tokens(path, length=length, pack=False, targets=targets)
    assert source.lengths.tolist() == [len(sample["tokens"]) for sample in everything(source)]
    found = everything(source)
    assert all(1 <= len(sample["tokens"]) <= length for sample in found)
    assert chained(sample["tokens"].tolist() for sample in found) == chained(documents)
    if targets:
        expected = chained([*document[1:], IGNORED] for document in documents if document)
        assert chained(sample["targets"].tolist() for sample in found) == expected


@given(sizes=SIZES, length=st.integers(1, 9), targets=st.booleans())
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_packed_documents_keep_every_token(sizes: list[int], length: int, targets: bool, tmp_path_factory: Any) -> None:
    documents = counted(sizes)
    path = written(tmp_path_factory.mktemp("tokens") / "a.npy", documents)
    follows = {one: two for document in documents for one, two in zip(document, [*document[1:], IGNORED], strict=False)}
    belongs = {token: number for number, document in enumerate(documents) for token in document}
    seen = []
    for sample in everything(tokens(path, length=length, targets=targets)):
        here, ids, places = (sample[name].tolist() for name in ("tokens", "documents", "positions"))
        assert len(here) == len(ids) == len(places) == length
        filled = sum(number > 0 for number in ids)
        assert filled
        assert (here[filled:], ids[filled:], places[filled:]) == ([0] * (length - filled),) * 3
        seen += here[:filled]
        for at in range(filled):
            begins = at == 0 or ids[at] != ids[at - 1]
            assert places[at] == (0 if begins else places[at - 1] + 1)
            assert begins or (here[at] == here[at - 1] + 1 and belongs[here[at]] == belongs[here[at - 1]])
            if targets:
                assert sample["targets"][at] == follows[here[at]]
        if targets:
            assert set(sample["targets"][filled:].tolist()) <= {IGNORED}
    assert sorted(seen) == chained(documents)


@given(sizes=st.lists(st.integers(1, 20), max_size=60), length=st.integers(20, 40))
def test_packing_is_best_fit_longest_first(sizes: list[int], length: int) -> None:
    order, cuts = pack_documents(np.array(sizes, np.int64), length)
    found = [
        sorted((sizes[number] for number in order[start:end]), reverse=True) for start, end in itertools.pairwise(cuts)
    ]
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        room = [one for one in bins if sum(one) + size <= length]
        (max(room, key=sum) if room else bins.append([]) or bins[-1]).append(size)
    assert sorted(map(sum, found)) == sorted(map(sum, bins))
    assert sorted(order.tolist()) == list(range(len(sizes)))


def test_packing_leaves_little_room() -> None:
    sizes = np.random.default_rng(0).lognormal(5.5, 1, 20_000).astype(np.int64).clip(1, 1024)
    _, cuts = pack_documents(sizes, 1024)
    assert sizes.sum() / ((len(cuts) - 1) * 1024) > 0.999


def test_a_token_can_end_documents(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", [5, 6, 0, 0, 7, 8])
    assert [sample["tokens"].tolist() for sample in everything(tokens(path, eos=0))] == [[5, 6, 0], [0], [7, 8]]
    other = saved(tmp_path / "b.bin", [9])
    assert len(everything(tokens(path, other, eos=0))) == 4


def test_rows_of_two_dimensions_are_documents(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", np.arange(12).reshape(3, 4), "int32")
    assert [sample["tokens"].tolist() for sample in everything(tokens(path))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert len(everything(tokens(path, length=8))) == 2


def test_fields_and_dtypes(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", range(10))
    (sample, _) = everything(
        tokens(path, length=4, targets=True, as_dtype="int64", fields={"x": "tokens", "y": "targets"})
    )
    assert sample["x"].tolist() == [0, 1, 2, 3]
    assert sample["y"].tolist() == [1, 2, 3, 4]
    assert sample["x"].dtype == np.int64
    with pytest.raises(OptionError, match="does not hold every uint16"):
        tokens(path, as_dtype="int16")
    with pytest.raises(SourceError, match="no field 'targets'"):
        tokens(path, fields=["targets"])
    wide = saved(tmp_path / "b.npy", [2**40], ">i8")
    assert everything(tokens(path, wide, length=11))[0]["tokens"].tolist() == [*range(10), 2**40]
    assert everything(tokens(saved(tmp_path / "c.bin", [70_000], "int32"), dtype="int32", length=1))[0]["tokens"] == [
        70_000
    ]


def test_documents_can_be_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", range(6))
    places = saved(tmp_path / "places.npy", [0, 2, 6], "int64")
    assert [len(sample["tokens"]) for sample in everything(tokens(path, documents=str(places)))] == [2, 4]
    with pytest.raises(OptionError, match="as many"):
        tokens(path, documents=[str(places)] * 2)
    for wrong in ([0, 2], [0, 7, 6], [1, 6], [[0, 6]], []):
        with pytest.raises(SourceError, match="has to"):
            tokens(path, documents=str(saved(tmp_path / "wrong.npy", wrong, "int64")))


def test_a_folder_is_opened_without_its_index_files(tmp_path: Path) -> None:
    written(tmp_path / "a.npy", [[1, 2], [3]])
    written(tmp_path / "b.npy", [[4]])
    source = penstock.open(str(tmp_path))
    assert [sample["tokens"].tolist() for sample in everything(source)] == [[1, 2], [3], [4]]


@pytest.mark.parametrize("loader", [TorchDataLoader, penstock.DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_give_every_window_once(tmp_path: Path, loader: Any, workers: int) -> None:
    source = tokens(saved(tmp_path / "a.npy", range(40_000)), length=1000, as_dtype="int64")
    found = [batch["tokens"] for batch in loader(source, batch_size=8, shuffle=True, num_workers=workers)]
    assert sorted(torch.cat(found).ravel().tolist()) == list(range(40_000))
    source.close()


def test_a_source_travels_and_sees_that_its_file_has_become_shorter(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", range(100))
    source = tokens(path, length=10)
    assert source[9]["tokens"][-1] == 99
    other = pickle.loads(pickle.dumps(source))
    path.write_bytes(b"1234")
    with pytest.raises(RecordError, match="shorter"):
        other[5]
    source.close()
    other.close()


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(SourceError, match="no whole number"):
        tokens(tmp_path / "a.bin")
    with pytest.raises(SourceError, match="have to be integers"):
        tokens(saved(tmp_path / "a.npy", [1.5], "float32"))
    with pytest.raises(SourceError, match="dimensions"):
        tokens(saved(tmp_path / "a.npy", np.zeros((2, 2, 2)), "int8"))
    path = saved(tmp_path / "a.npy", range(10))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SourceError, match="is truncated"):
        tokens(path)
    path.write_bytes(b"123456")
    with pytest.raises(SourceError, match="no file of NumPy's"):
        tokens(path)
    with pytest.raises(SourceError, match="one field"):
        TokenWriter(str(path), {"x": Field("array", "int8", (None,))})
    with pytest.raises(OptionError, match="length=0"):
        tokens(path, length=0)


def test_headers_of_python_2_are_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", range(10))
    path.write_bytes(path.read_bytes().replace(b"(10,), }  ", b"(10L,), } ", 1))
    with pytest.warns(UserWarning, match="Python 2"):
        assert tokens(path, length=10)[0]["tokens"].tolist() == [*range(10)]


def llm_c(path: Path, values: Any, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    """As karpathy/llm.c writes its data."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(values)
    path.write_bytes(header.tobytes() + np.asarray(values, dtype).tobytes())
    return path


def megatron(path: Path, sequences: list[list[int]], code: int, dtype: str, documents: list[int] | None = None) -> Path:
    """As Megatron-LM's IndexedDatasetBuilder writes it."""
    sizes = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    places = range(len(sequences) + 1) if documents is None else documents
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(places))
    rest = (np.array(one, kind).tobytes() for one, kind in ((sizes, "<i4"), (starts, "<i8"), (places, "<i8")))
    path.with_suffix(".idx").write_bytes(head + b"".join(rest))
    np.array(chained(sequences), dtype).tofile(path)
    return path


def test_shards_of_llm_c_are_read_without_their_headers(tmp_path: Path) -> None:
    for number in range(2):
        llm_c(tmp_path / f"{number}.bin", range(number * 10, number * 10 + 10))
    assert chained(sample["tokens"] for sample in everything(penstock.open(tmp_path, length=4))) == list(range(20))
    wide = llm_c(tmp_path / "llama.bin", [100_000, 2, 3], 20240801, 7, "<u4")
    assert everything(penstock.open(wide, length=3))[0]["tokens"].tolist() == [100_000, 2, 3]
    with pytest.raises(OptionError, match=r"dtype='int32', and the header of .*llama\.bin says uint32"):
        penstock.open(wide, dtype="int32")
    for version, extra, words in ((2, b"", "has version 2"), (1, b"\0\0", "should have 3 tokens")):
        other = llm_c(tmp_path / "other.bin", [1, 2, 3], version=version)
        other.write_bytes(other.read_bytes() + extra)
        with pytest.raises(SourceError, match=words):
            penstock.open(other)


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_files_of_megatron_are_read_with_the_dtype_of_their_index(tmp_path: Path, code: int, dtype: str) -> None:
    for number in range(2):
        megatron(tmp_path / f"{number}.bin", [[number, 2], [3], [4, 100]], code, dtype, [0, 2, 3])
    found = everything(penstock.open(tmp_path))
    assert [sample["tokens"].tolist() for sample in found] == [[0, 2, 3], [4, 100], [1, 2, 3], [4, 100]]
    assert {sample["tokens"].dtype for sample in found} == {np.dtype(dtype)}


def test_indexes_of_megatron_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[1, 2], [3]], 4, "<i4")
    with pytest.raises(OptionError, match=r"dtype='uint16', and .*a\.idx says int32"):
        tokens(path)
    whole = path.with_suffix(".idx").read_bytes()
    for changed, words in (
        (b"TNTIDX" + whole[6:], "no index of Megatron's"),
        (whole[:20], "no index of Megatron's"),
        (whole[:17] + b"\6" + whole[18:], "tokens of code 6"),
        (whole[:-1], "is truncated"),
        (whole[:34] + b"\1" + whole[35:], "one after another"),
        (whole[:-8] + bytes(8), "its documents do not go up"),
    ):
        path.with_suffix(".idx").write_bytes(changed)
        with pytest.raises(SourceError, match=words):
            penstock.open(path)
    path.with_suffix(".idx").write_bytes(whole)
    path.write_bytes(path.read_bytes() + b"1234")
    with pytest.raises(SourceError, match=r"is of 3 tokens of int32, and .* has 16 bytes"):
        penstock.open(path)


def test_bare_integers_need_a_dtype(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.bin", range(2000))
    with pytest.raises(SourceError, match="holds bare integers, and nothing says of which type; pass dtype="):
        penstock.open(path)
    assert len(everything(penstock.open(path, dtype="int32", length=500))) == 2


def test_mutated_files_give_the_errors_that_are_told(tmp_path: Path) -> None:
    rng = random.Random(0)
    path, index = written(tmp_path / "a.npy", [[1, 2, 3]] * 20), tmp_path / "a.idx.npy"
    wholes = [path.read_bytes(), index.read_bytes()]
    for _ in range(800):
        for target, whole in zip((path, index), wholes, strict=True):
            data = bytearray(whole)
            if rng.random() < 0.6:
                at = rng.randrange(len(data) if rng.random() < 0.5 else 128)
                what = rng.randrange(3)
                if what == 0:
                    data[at] ^= 1 << rng.randrange(8)
                elif what == 1:
                    del data[at:]
                else:
                    data[at:at] = rng.randbytes(rng.randrange(5))
            target.write_bytes(data)
        for options in ({}, {"length": 7}, {"length": 7, "pack": False}):
            try:
                source = tokens(path, max_record_nbytes=10_000, **options)
            except SourceError:
                continue
            try:
                everything(source)
            except RecordError:
                source.close()


def test_a_pointer_of_git_lfs_is_no_row_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123456\n\n")
    with pytest.raises(SourceError, match=r"pointer of Git LFS, .*git lfs pull"):
        penstock.open(path, dtype="uint16", length=4)
