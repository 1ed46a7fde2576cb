"""`penstock.shared`: the content of what was put in, read from one segment by every process."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.core import shared_bytes
from penstock.core.errors import OptionError, TransportError, UnpicklableError
from penstock.loader.checkpoint.dataset_fingerprint import fingerprint
from penstock.observe.doctor.probes import proc

LISTS = [
    [],
    [1, -(2**63), 2**63 - 1],
    [1, 2**63],
    [True, False],
    [1, 2.0],
    [0.1, float("inf"), -0.0],
    ["a", "", "ä𝄞", "\udcff\0"],
    [b"", b"\0x"],
    [None, (1, ("a", None)), {"k": [1, 2]}, {3}, "text", b"bytes", 1.5, 7, Path("a/b")],
]


@pytest.mark.parametrize("items", LISTS, ids=range(len(LISTS)))
def test_a_shared_list_reads_as_the_list_that_was_put_in(items: list[Any]) -> None:
    one = penstock.shared(items)
    assert len(one) == len(items)
    assert one == items
    assert [*one] == items
    assert [*map(type, one)] == [*map(type, items)]
    assert [one[place] for place in range(-len(items), len(items))] == items * 2
    for cut in (slice(1, None), slice(None, None, -1), slice(-2, 50, 2), slice(0, 0)):
        assert [*one[cut]] == items[cut]
        assert [*one[cut][::-1]] == items[cut][::-1]
    assert pickle.loads(pickle.dumps(one)) == items
    assert copy.deepcopy(one) == items
    assert copy.copy(one) == one
    for outside in (len(items), -len(items) - 1):
        with pytest.raises(IndexError, match=f"item {outside} of a shared list of {len(items)}"):
            one[outside]


def test_an_item_is_a_fresh_copy_and_the_container_cannot_be_written() -> None:
    one: Any = penstock.shared([{"boxes": np.zeros(2)}])
    one[0]["boxes"][:] = 1
    assert (one[0]["boxes"] == 0).all()
    with pytest.raises(TypeError):
        one[0] = {}


def test_a_large_container_within_one_is_shared_itself_so_that_a_look_up_makes_its_entry_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"name {number}" for number in range(2000)]
    data = {"names": names, "ids": {name: [place] for place, name in enumerate(names)}, "odd": {object: names}, "n": 1}
    made = penstock.shared(data)
    table = pickle.loads(pickle.dumps(made))
    assert table["names"] == names
    assert (table["odd"], table["n"]) == ({object: names}, 1)
    nested = penstock.shared([names, np.zeros(1 << 18, np.float64), ("small", names[:3])])
    assert nested[0][-1] == names[-1]
    assert nested[2] == ("small", names[:3])
    with pytest.raises(TypeError):
        table["names"][3] = "lost"
    with pytest.raises(ValueError, match="read-only"):
        nested[1][0] = 1
    unpickled = list[int]()
    loads = pickle.loads
    monkeypatch.setattr(pickle, "loads", lambda content: unpickled.append(len(content)) or loads(content))
    entry = penstock.shared(data)["ids"]["name 1999"]
    assert entry == [1999]
    assert max(unpickled) < 100


def test_lists_are_equal_only_to_lists_of_the_same_items() -> None:
    one = penstock.shared(["a", "b"])
    assert one != ["a"]
    assert one != ["a", "c"]
    assert one != "ab"
    assert one == penstock.shared(("a", "b"))
    assert penstock.shared(one) is one
    assert ("b" in one, one.index("b"), [*reversed(one)]) == (True, 1, ["b", "a"])


def test_what_it_is_can_be_read_without_all_of_it() -> None:
    assert repr(penstock.shared([*range(9)])) == "<SharedList of 9, in 72 bytes: [0, 1, 2, ...]>"
    assert repr(penstock.shared({"a": 1})) == "<SharedDict of 1, in 8 bytes: {'a': 1}>"


def test_a_pickle_does_not_grow_with_the_content() -> None:
    content = ["x" * 100] * 10_000
    for one in (content, dict(enumerate(content)), np.array(content)):
        assert len(pickle.dumps(penstock.shared(one))) < 1500


def test_a_shared_dict_reads_as_the_dict_that_was_put_in() -> None:
    data = {"cat": 0, b"cat": [1], 3: "three", -1: None, ("a", 2, None): (1,), 2.5: {}, None: 6, "ä\udcff": 7, (): 8}
    for one in _and_its_pickle(penstock.shared(data)):
        assert one == data
        assert [*one.items()] == [*data.items()]
        assert (one[3.0], one[np.int64(3)]) == ("three", "three")
        assert ("dog" in one, one.get(frozenset()), one.get("cat")) == (False, None, 0)
        with pytest.raises(KeyError, match="dog"):
            one["dog"]
        with pytest.raises(TypeError):
            one[[]]
    assert penstock.shared({}) == {}


def test_keys_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.shared._hash_in_any_process", lambda key: 7)
    one = penstock.shared({"a": 1, "b": 2, "c": 3})
    assert [one[key] for key in "cab"] == [3, 1, 2]
    assert "d" not in one


@pytest.mark.parametrize("key", [float("nan"), frozenset("a"), ("a", object())], ids=["nan", "frozenset", "object"])
def test_a_key_that_could_not_be_found_again_is_refused(key: Any) -> None:
    with pytest.raises(OptionError, match="cannot find the key"):
        penstock.shared({"a": 1, key: 2})


def test_a_shared_array_is_the_array_and_what_is_taken_of_it_is_plain() -> None:
    for data in (np.arange(6.0).reshape(2, 3).T, np.array(3, "M8[s]"), np.empty((0, 2)), np.array(["a", "bc"])):
        for one in _and_its_pickle(penstock.shared(data)):
            assert one.dtype == data.dtype
            np.testing.assert_array_equal(one, data, strict=True)
            assert not one.flags.writeable
    one = penstock.shared(np.arange(6.0))
    assert {type(one[1:]), type(one + 1), type(np.asarray(one)), type(pickle.loads(pickle.dumps(one[1:])))} == {
        np.ndarray
    }
    assert type(one.sum()) is np.float64
    with pytest.raises(ValueError, match="read-only"):
        one[:] = 0


def test_no_process_can_write_to_the_memory_of_a_shared_array() -> None:
    one = penstock.shared(np.arange(4))
    for array in (*_and_its_pickle(one), np.asarray(one), one[1:], one.T, one.view(np.uint8)):
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.setflags(write=True)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_write_in_c, args=(one,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGSEGV
    child.close()
    assert one.tolist() == [0, 1, 2, 3]


def test_a_shared_frame_is_the_frame() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"label": [3, 1], "path": pandas.array(["a", "ä"], "string[pyarrow]"), "x": [0.5, None]})
    for one in _and_its_pickle(penstock.shared(frame)):
        pandas.testing.assert_frame_equal(pandas.DataFrame(one), frame)
        assert one.iloc[1]["path"] == "ä"
        assert type(one[one.label > 1]) is pandas.DataFrame
        with pytest.raises(ValueError, match="read-only"):
            one.iloc[0, 0] = 9
    assert frame.label[0] == 3
    with pytest.raises(OptionError, match="other would be Python objects"):
        penstock.shared(frame.assign(other=pandas.Series([{}, 1], dtype=object)))


@pytest.mark.filterwarnings("ignore:The inplace keyword")
@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.__setitem__("label", frame["label"] * 10),
        lambda frame: frame.loc.__setitem__((0, "at"), "2026-01-02"),
        lambda frame: frame.sort_values("label", inplace=True),
        lambda frame: frame.pop("path"),
        lambda frame: frame.set_index("label", inplace=True),
        lambda frame: setattr(frame, "columns", ["a", "b", "c"]),
        lambda frame: setattr(frame.index, "name", "number"),
        lambda frame: setattr(frame.flags, "allows_duplicate_labels", False),
    ],
)
def test_a_shared_frame_that_was_changed_is_pickled_as_what_it_holds(change: Callable[[Any], object]) -> None:
    pandas = pytest.importorskip("pandas")
    text = pandas.array(["a", "ä"], "string[pyarrow]")
    frame = pandas.DataFrame({"label": [3, 1], "path": text, "at": pandas.to_datetime(["2026-01-01"] * 2)})
    shared = penstock.shared(frame)
    assert type(pickle.loads(pickle.dumps(shared))) is type(shared)
    change(shared)
    again = pickle.loads(pickle.dumps(shared))
    pandas.testing.assert_frame_equal(again, pandas.DataFrame(shared), check_flags=False)
    assert again.flags == shared.flags
    assert type(again) is pandas.DataFrame
    pandas.testing.assert_frame_equal(pandas.DataFrame(penstock.shared(shared)), again, check_flags=False)


def test_a_shared_frame_keeps_its_attributes_and_names_an_object_column_of_two_of_a_name() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2]})
    frame.attrs["source"] = "a survey"
    assert pickle.loads(pickle.dumps(penstock.shared(frame))).attrs == {"source": "a survey"}
    two = pandas.concat([pandas.Series(["x", 3], name="a", dtype=object), frame["a"]], axis=1)
    with pytest.raises(OptionError, match="of this DataFrame a would be Python objects"):
        penstock.shared(two)


def test_what_cannot_be_shared_is_named() -> None:
    with pytest.raises(UnpicklableError, match=r"item 1 \(function\) cannot be pickled"):
        penstock.shared(["a", lambda: 0])
    with pytest.raises(UnpicklableError, match="the value of 'f'"):
        penstock.shared({"f": lambda: 0})
    with pytest.raises(OptionError, match="holds Python objects"):
        penstock.shared(np.array([None]))
    for other in ({1}, np.ma.array([1]), "text"):
        with pytest.raises(OptionError, match=r"not (set|MaskedArray|str)"):
            penstock.shared(other)


def test_a_forked_worker_that_reads_everything_copies_nothing() -> None:
    rows = [(f"image-{number}.jpg", float(number)) for number in range(60_000)]
    one = penstock.shared(rows)
    grown = [_in_child("fork", _growth_of_reading, container) for container in (rows, one)]
    assert grown[0] > 4 << 20  # what this is about
    assert grown[1] < 2 << 20


def test_a_worker_with_a_fresh_interpreter_maps_the_same_memory() -> None:
    cell = shared_bytes.SharedBytes(1)
    data = penstock.shared({"a": 1, ("b", None): [2]}), penstock.shared(np.arange(3)), penstock.shared(["x"])
    assert _in_child("forkserver", _write_and_read, (cell, *data)) == (1, [2], [0, 1, 2], ["x"])
    assert cell.memory[0] == 9


def test_it_outlives_the_process_that_made_it_and_was_killed() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    maker = context.Process(target=_make_and_wait, args=(there,))
    maker.start()
    pickled = here.recv()
    one = pickle.loads(pickled)
    os.kill(maker.pid or 0, signal.SIGKILL)
    maker.join()
    maker.close()
    here.close()
    there.close()
    assert one == ["a", "b"]
    with pytest.raises(TransportError, match="make it anew"):
        pickle.loads(pickled)


def test_a_pickle_does_not_find_what_has_its_descriptor_now() -> None:
    one = penstock.shared([1, 2])
    pickled = pickle.dumps(one)
    del one
    other = penstock.shared([3, 4])
    try:
        assert pickle.loads(pickle.dumps(other)) == [3, 4]
        with pytest.raises(TransportError, match="something else"):
            pickle.loads(pickled)
    finally:
        del other


def test_without_memfd_it_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_bytes, "memfd_works", lambda: False)
    one = penstock.shared(["a", "b"])
    again = pickle.loads(pickle.dumps(one))
    assert _in_child("fork", list, again) == ["a", "b"]  # and the child's end does not remove the name
    assert pickle.loads(pickle.dumps(one)) == ["a", "b"]


def test_many_threads_may_read_it() -> None:
    rows = [(str(number), {"n": number}) for number in range(500)]
    one = penstock.shared(rows)
    wrong: list[int] = []

    def read(first: int) -> None:
        wrong.extend(place for place in range(first, 500) if one[place] != rows[place])

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_checkpoint_knows_a_dataset_by_its_shared_list_as_by_its_list() -> None:
    class Files:
        def __init__(self, paths: Any) -> None:
            self.paths = paths

        def __len__(self) -> int:
            return len(self.paths)

    assert (
        fingerprint(Files(penstock.shared(["a", "b"])))
        == fingerprint(Files(["a", "b"]))
        != fingerprint(Files(["a", "c"]))
    )


def _and_its_pickle(one: Any) -> tuple[Any, Any]:
    return one, pickle.loads(pickle.dumps(one))


def _write_in_c(array: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    ctypes.memset(array.ctypes.data, 9, array.nbytes)


def _growth_of_reading(container: Any) -> int:
    before = proc.private_nbytes() or 0
    for item in container:
        assert item
    return (proc.private_nbytes() or 0) - before


def _write_and_read(given: Any) -> Any:
    cell, names, numbers, words = given
    cell.memory[0] = 9
    return names["a"], names["b", None], numbers.tolist(), [*words]


def _make_and_wait(pipe: Any) -> None:
    one = penstock.shared(["a", "b"])
    pipe.send(pickle.dumps(one))
    signal.pause()


def _in_child(method: str, function: Callable[[Any], Any], given: Any) -> Any:
    context = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(there, function, given))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        here.close()
        child.join()
        child.close()


def _run(pipe: Any, function: Callable[[Any], Any], given: Any) -> None:
    pipe.send(function(given))
    pipe.close()
