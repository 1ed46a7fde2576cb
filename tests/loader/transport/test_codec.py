"""Whatever pickle can carry comes back equal, its bytes in the slot."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_sets import Pair
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.core.errors import UnpicklableError
from penstock.loader.transport import codec
from penstock.loader.transport.arena import Arena, ArenaFullError


def round_trip(obj, slot_nbytes: int = 1 << 22):
    memory = np.zeros(slot_nbytes, np.uint8)
    envelope = codec.encode(obj, Arena(memory))
    return codec.decode(envelope, None if codec.is_inline(envelope) else memory)


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = torch.uint8 if a.is_contiguous() and a.dim() and a.element_size() and a.is_floating_point() else None
        equal = torch.equal(a.view(raw), b.view(raw)) if raw else torch.equal(a, b)
        return equal and a.dtype == b.dtype and a.stride() == b.stride() and a.requires_grad == b.requires_grad
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
            and a.flags.f_contiguous == b.flags.f_contiguous
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
tensors = st.builds(
    lambda dtype, size, seed: torch.randint(0, 2, size, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 99),
)
arrays = st.builds(
    lambda dtype, size, order: np.asarray(np.arange(int(np.prod(size))).reshape(size).astype(dtype), order=order),
    st.sampled_from(["f4", "i8", "u1", "U5", "?", ">i4", "c16"]),
    st.lists(st.integers(0, 30), max_size=3).map(tuple),
    st.sampled_from(["C", "F"]),
)
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=8)
objects = st.recursive(
    plain | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(objects)
def test_any_structure_comes_back_equal(obj) -> None:
    assert same(obj, round_trip(obj))


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.randn(4 * n, 5).t(),
        lambda n: torch.randn(2, 8, 5, 6 * n).to(memory_format=torch.channels_last),
        lambda n: torch.ones(1).expand(1000 * n),
        lambda n: torch.randn(30 * n, requires_grad=True),
        lambda n: torch.randn(20 * n, 3).to(torch.float8_e4m3fn),
        lambda n: torch.tensor(3.0),
        lambda n: torch.randn(n, 1, 4, 4).to(memory_format=torch.channels_last),
        lambda n: torch.as_strided(torch.randn(20 * n), (1, 20 * n), (7, 1)),
    ],
)
def test_dense_tensors_keep_strides_and_flags(make, scale: int) -> None:
    tensor = make(scale)
    assert same(tensor, round_trip(tensor))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("count", [3, 10_000])
def test_an_array_that_may_not_be_written_to_arrives_as_one_that_may_as_with_torch(count: int, order: Any) -> None:
    array = np.asarray(np.arange(2.0 * count).reshape(2, count), order=order)
    array.flags.writeable = False
    arrived = round_trip([array])[0]
    assert arrived.flags.writeable
    assert (arrived.strides, arrived.tolist()) == (array.strides, array.tolist())
    assert not array.flags.writeable


def test_tensors_of_every_kind_come_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = [
            torch.randn(30, 400).to_sparse(),
            torch.randn(30, 400).to_sparse_csr(),
            torch.quantize_per_tensor(torch.randn(300, 40), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.randn(5000), torch.randn(3)]),
            torch.nested.nested_tensor([torch.randn(5000), torch.randn(3)], layout=torch.jagged),
            torch.nn.Parameter(torch.randn(5000)),
            torch.randn(3, dtype=torch.complex64).conj(),
        ]
        for tensor in kinds:
            again = round_trip(tensor)
            assert type(again) is type(tensor)
            assert again.layout == tensor.layout
            left, right = (
                [part.float() for part in t.unbind()]
                if t.is_nested
                else [t.dequantize() if t.is_quantized else t.to_dense() if t.layout != torch.strided else t.detach()]
                for t in (tensor, again)
            )
            assert all(map(torch.equal, left, right))


def test_what_is_in_two_places_comes_back_as_one_object() -> None:
    tensor, names = torch.arange(5), ["a"]
    first, second, *lists = round_trip([tensor, tensor, names, names])
    assert first is second
    assert lists[0] is lists[1] == ["a"]


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: (whole[:, :-1], whole[:, 1:]),
        lambda whole: (whole, whole.t()),
        lambda whole: {"x": whole, "y": whole[2:].view(torch.int32)},
        lambda whole: Pair(whole[:, ::3], [whole[0], whole]),
        lambda whole: (*whole.chunk(4, 1),),
        lambda whole: [whole, whole.expand(2, 40, 200)],
    ],
)
def test_views_of_one_tensor_come_back_as_views_of_one(make) -> None:
    sent = make(torch.arange(8_000).view(40, 200))
    received = round_trip(sent)
    assert same(sent, received)
    views, copies = (torch.utils._pytree.tree_leaves(batch) for batch in (sent, received))
    assert [view.storage_offset() for view in views] == [copy.storage_offset() for copy in copies]
    for one in (views, copies):
        one[0].zero_()
    assert same(sent, received)


def test_a_small_view_of_all_of_the_data_travels_without_it() -> None:
    whole = torch.arange(1_000_000)
    received = round_trip([whole[5:2_000], whole[7:2_000]])
    assert same([whole[5:2_000], whole[7:2_000]], received)
    assert [view.untyped_storage().nbytes() for view in received] == [1995 * 8, 1993 * 8]


class Custom:
    def __init__(self) -> None:
        self.images = torch.randn(100, 100)
        self.names = ["a"]


def test_a_custom_class_has_its_tensors_in_the_slot() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    obj = Custom()
    envelope = codec.encode(obj, Arena(memory))
    assert len(envelope) < 1000
    again = codec.decode(envelope, memory)
    assert torch.equal(again.images, obj.images)
    memory[:] = 0
    assert again.images.abs().sum() == 0


def test_a_tensor_that_lies_in_the_slot_is_not_copied() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    arena = Arena(memory)
    tensor = arena.tensor((1000, 10), torch.float32)
    used = arena.used
    codec.encode([tensor, tensor[10:20]], arena)
    assert arena.used == used


def test_a_slot_that_is_too_small_raises_with_the_size_needed() -> None:
    obj = [torch.zeros(10_000), torch.zeros(20_000)]
    with pytest.raises(ArenaFullError) as caught:
        codec.encode(obj, Arena(np.zeros(50_000, np.uint8)))
    codec.encode(obj, Arena(np.zeros(caught.value.needed, np.uint8)))


def test_views_keep_the_slot_alive_through_slices_and_numpy() -> None:
    import weakref

    memory = np.zeros(1 << 20, np.uint8)
    envelope = codec.encode(torch.ones(100, 100), Arena(memory))
    lease = np.frombuffer(memoryview(memory), np.uint8)
    gone = weakref.ref(lease)
    view = codec.decode(envelope, lease)[3:].view(-1).numpy()[5:]
    del lease
    assert gone() is not None
    del view
    assert gone() is None


def test_what_pickle_refuses_is_one_clear_error() -> None:
    with pytest.raises(UnpicklableError, match="cannot travel from its worker"):
        codec.encode([lambda: 0], None)


SHARED = torch.zeros(8, 4).share_memory_()


class Views(Dataset[torch.Tensor]):
    """Samples that are views of memory that all processes share."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return SHARED[index]


def _as_they_are(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {"rows": samples, "all": SHARED}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_in_shared_memory_arrive_as_the_same_memory(workers: int) -> None:
    for kind in (torch.utils.data.DataLoader, DataLoader):
        SHARED.zero_()
        for number, batch in enumerate(kind(Views(), 2, num_workers=workers, collate_fn=_as_they_are)):
            batch["rows"][1].fill_(number + 1)
            assert torch.equal(batch["all"], SHARED)
        assert SHARED[:, 0].tolist() == [0, 1, 0, 2, 0, 3, 0, 4]
        for row in kind(Views(), None, num_workers=workers):
            row.fill_(7)
        assert SHARED.eq(7).all()


def test_a_collated_batch_of_samples_in_shared_memory_is_its_own() -> None:
    SHARED.zero_()
    for batch in DataLoader(Views(), 4, num_workers=1):
        batch.fill_(3)
    assert SHARED.eq(0).all()
