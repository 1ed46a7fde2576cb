"""Collating into a slot gives what default_collate gives: same values, same types, same errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import Pair
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from penstock.loader.collate import BatchWriter, arena_needed, collate_map, collate_samples, fast_map, stack_in_slots
from penstock.loader.transport.arena import Arena


def outcome(make) -> Any:
    try:
        return make()
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def written(samples: list[Any], arena: Arena | None = None) -> BatchWriter:
    writer = BatchWriter(samples[0], len(samples), arena or Arena(np.zeros(1 << 22, np.uint8)))
    for sample in samples:
        writer.add(sample)
    return writer


SHAPES = st.sampled_from([(7,), (3, 5), (2, 3, 4), ()])


@st.composite
def makers(draw, depth: int = 0):
    """A function from a row number to a sample; all its samples have one tensor_spec."""
    kind = draw(
        st.sampled_from(
            [
                "tensor",
                "array",
                "int",
                "float",
                "str",
                "scalar",
                "bool",
                *["dict", "list", "tuple", "pair"] * (depth < 2),
            ]
        )
    )
    if kind in ("tensor", "array"):
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from(["float32", "int64", "uint8", "bool", "float64"]))
        if kind == "tensor":
            permute = draw(st.booleans()) and len(shape) > 1
            return lambda i: (lambda t: t.transpose(0, 1) if permute else t)(
                torch.full(shape, i % 2).to(getattr(torch, dtype))
            )
        return lambda i: np.full(shape, i % 2).astype(dtype)
    if kind in ("dict", "list", "tuple", "pair"):
        parts = draw(
            st.lists(makers(depth + 1), min_size=2 if kind == "pair" else 1, max_size=2 if kind == "pair" else 3)
        )
        build = {
            "dict": lambda items: dict(zip("abc", items, strict=False)),
            "list": list,
            "tuple": tuple,
            "pair": lambda items: Pair(*items),
        }[kind]
        return lambda i: build([part(i) for part in parts])
    return {"int": int, "float": float, "str": str, "bool": lambda i: i % 2 == 0, "scalar": np.float32}[kind]


@settings(max_examples=150, deadline=None)
@given(makers(), st.integers(1, 9))
def test_the_batch_is_default_collates(make, count: int) -> None:
    samples = [make(i) for i in range(count)]
    expected = outcome(lambda: default_collate(samples))
    assert same(outcome(lambda: written(samples).finish()), expected)
    assert same(outcome(lambda: collate_samples(samples, Arena(np.zeros(1 << 22, np.uint8)))), expected)


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")  # torch says it once in a process
@settings(max_examples=150, deadline=None)
@given(makers(), makers(), st.integers(1, 5), st.integers(1, 4))
def test_samples_of_two_tensor_specs_end_as_in_default_collate(make, other, count: int, more: int) -> None:
    samples = [make(i) for i in range(count)] + [other(i) for i in range(more)]
    assert same(outcome(lambda: written(samples).finish()), outcome(lambda: default_collate(samples)))


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")  # torch says it once in a process
@pytest.mark.parametrize("odd", [torch.zeros(3), torch.zeros(4, dtype=torch.float64), "text", {"a": torch.zeros(4)}])
def test_a_misfit_anywhere_gives_default_collates_answer(odd: Any) -> None:
    for place in range(1, 4):
        samples: list[Any] = [torch.full((4,), float(i)) for i in range(4)]
        samples[place] = odd
        assert same(outcome(lambda: written(samples).finish()), outcome(lambda: default_collate(samples)))  # noqa: B023


def test_the_tensors_lie_in_the_arena() -> None:
    arena = Arena(np.zeros(1 << 22, np.uint8))
    batch = written([(torch.ones(100, 100), 1)] * 8, arena=arena).finish()
    assert arena.offset_of(batch[0].data_ptr(), batch[0].nbytes) == 0


def test_a_small_batch_needs_no_arena() -> None:
    assert arena_needed((torch.zeros(3), 1), 8) == (0, False)
    assert arena_needed((torch.zeros(1000), 1), 8)[0] >= 32_000


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")  # torch says it once in a process
@pytest.mark.parametrize("kind", [*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?"])
def test_numpys_numbers_give_default_collates_tensor_or_its_error(kind: str) -> None:
    number = np.dtype(kind).type
    largest = np.iinfo(number).max if issubclass(number, np.integer) else number(1.5)
    for samples in ([number(1), number(largest)], [number(1), np.int64(2)], [number(1), 2], [number(1), True]):
        assert same(
            outcome(lambda it=samples: collate_samples(it, None)), outcome(lambda it=samples: default_collate(it))
        )


@pytest.mark.parametrize(
    "shapes", [[(3,), (5,), (1,)], [(1, 2), (3, 2)], [(2, 3), (3, 2)], [(), (1,)], [(0,), (0,)], [(2, 0), (2, 0)]]
)
def test_arrays_of_other_shapes_give_default_collates_answer(shapes: list[tuple[int, ...]]) -> None:
    samples = [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)]
    for arena in (None, Arena(np.zeros(1 << 12, np.uint8))):
        found = outcome(lambda it=arena: collate_samples(samples, it))
        assert same(found, outcome(lambda: default_collate(samples)))


@pytest.mark.parametrize("kind", [int, float, np.int64, np.float32])
def test_labels_lie_in_torchs_memory_or_the_heap_gives_the_pages_of_pictures_back(kind: type) -> None:
    samples = [(torch.zeros(2), kind(number)) for number in range(3)]
    labels = [collate(samples, collate_fn_map=fast_map())[1] for _ in range(16)]
    assert all(one.tolist() == [0, 1, 2] for one in labels)
    assert all(one.data_ptr() % 64 == 0 for one in labels)  # as torch aligns what it allocates; NumPy does not


def test_a_worker_collates_numbers_and_containers_as_the_training_process_does(monkeypatch) -> None:
    in_training = collate_map(None)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, default_collate_fn_map[torch.Tensor])  # put back later
    stack_in_slots()
    in_worker = collate_map(None)
    for kind in (int, float, dict, tuple, list):
        assert in_worker[kind] is in_training[kind] is not default_collate_fn_map.get(kind)


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_function_that_the_program_has_put_into_torchs_map_counts(monkeypatch, in_worker: bool) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, default_collate_fn_map[torch.Tensor])
    if in_worker:
        stack_in_slots()
    monkeypatch.setitem(default_collate_fn_map, int, lambda batch, **_: sum(batch))
    assert collate_samples([{"a": 1}, {"a": 2}], None) == {"a": 3}


def test_labels_stay_on_the_host_when_the_default_device_changes_during_an_epoch() -> None:
    fast = fast_map()
    with torch.device("meta"):
        assert collate([1, 2], collate_fn_map=fast).tolist() == [1, 2]


@pytest.mark.parametrize("shape", [(3,), (3, 4), (40_000,)])
def test_arrays_that_may_not_be_written_to_are_collated_without_a_warning(shape: tuple[int, ...]) -> None:
    samples = []
    for number in range(4):
        array = np.full(shape, number, np.float32)
        array.flags.writeable = False
        samples.append({"here": array, "there": array[::-1], "label": number})
    found = written(samples).finish()
    assert found["here"].shape == (4, *shape)
    assert [row.flatten()[0].item() for row in found["there"]] == [0, 1, 2, 3]
