"""Loading without workers as torch does: what is measured, what is noted, and that batches stay torch's."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import collate

from penstock import DataLoader
from penstock.loader.collate import fast_map
from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.orders import order_for
from penstock.loader.scheduling.batch import BatchBytes

Point = namedtuple("Point", "x y")


class Large(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((300_000,), float(index))


class OwnIterator(IterableDataset[int]):
    """Begins again whenever it is asked for an iterator, as many people write it."""

    def __iter__(self) -> OwnIterator:
        self.at = -1
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 7:
            raise StopIteration
        return self.at


@pytest.mark.parametrize(("length", "batch_size"), [(3_000, 100), (100_000, 3)], ids=["stacked at the end", "by rows"])
@pytest.mark.parametrize("batches", [16, 70])
def test_large_batches_of_a_long_pass_lie_in_slots_that_are_reused(length: int, batch_size: int, batches: int) -> None:
    class Rows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return batches * batch_size

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((length,), index)

    loader, torchs = (kind(Rows(), batch_size=batch_size, shuffle=True) for kind in (DataLoader, TorchDataLoader))
    for _ in range(2):
        torch.manual_seed(4)
        expected = [batch[:, 0].clone() for batch in torchs]
        torch.manual_seed(4)
        for batch, numbers in zip(loader, expected, strict=True):
            assert torch.equal(batch, numbers[:, None].expand(-1, length))
    ring = loader.statistics().ring
    assert (0 < ring.nbytes < 4 * 8 * length * batch_size) == (batches == 70)
    assert loader.statistics().samples == 2 * len(Rows())


@pytest.mark.parametrize("batch_size", [3, 7, None])
def test_a_stream_that_is_its_own_iterator_goes_on(batch_size: int | None) -> None:
    torchs, ours = (list(kind(OwnIterator(), batch_size=batch_size)) for kind in (TorchDataLoader, DataLoader))
    assert list(map(str, torchs)) == list(map(str, ours))


def test_an_error_in_a_stream_leaves_it_where_torch_leaves_it() -> None:
    class Failing(OwnIterator):
        def __next__(self) -> int:
            value = super().__next__()
            if value == 2:
                raise ValueError("sample 2")
            return value

    seen = []
    for kind in (TorchDataLoader, DataLoader):
        batches = iter(kind(Failing(), batch_size=2))
        found = [next(batches).tolist()]
        with pytest.raises(ValueError, match="sample 2"):
            next(batches)
        seen.append([*found, *(batch.tolist() for batch in batches)])
    assert seen[0] == seen[1] == [[0, 1], [3, 4], [5, 6]]


@pytest.mark.parametrize("batches", [[(0, 1), (2,)], [range(2)], [{3}], [torch.tensor([1, 2])], [iter([4, 5])]])
def test_a_batch_of_indices_may_be_any_iterable(batches: Any) -> None:
    (batch,) = list(DataLoader(Large(), batch_sampler=batches[:1]))
    assert batch.shape[1] == 300_000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", [SequentialSampler(range(10)), RandomSampler(range(10))])
def test_index_tensors_are_the_samplers_batches(sampler: Any, drop_last: bool) -> None:
    batches = BatchSampler(sampler, 4, drop_last)
    torch.manual_seed(3)
    expected = list(batches)
    torch.manual_seed(3)
    cursor = BatchCursor(batches, order_for(batches, snapshot_every=1))
    assert cursor.draw_tensors()
    found = [*cursor]
    assert [type(batch) for batch in found] == [torch.Tensor] * len(expected)
    assert [batch.tolist() for batch in found] == expected


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [1, True],
        [True, False],
        [1, 2.5],
        [2.5, 1],
        [2**63 - 1, -(2**63)],
        [2**63, 1],
        [0.1, float("nan")],
        [{"a": 1, "b": [1, 2]}, {"b": [3, 4], "a": 2}],
        [{"a": 1}, {"b": 2}],
        [(1, "x"), (2, "y")],
        [[1, 2], [3]],
        [[torch.ones(2)], [torch.zeros(2)]],
        [OrderedDict(a=1), OrderedDict(a=2)],
        [Point(1, 2.0), Point(3, 4.0)],
        [torch.ones(2), torch.ones(3)],
        [torch.eye(2).to_sparse()] * 2,
        [object(), object()],
        [None],
    ],
)
def test_usual_samples_are_collated_as_by_torch(samples: Any) -> None:
    results = []
    for make in (default_collate, lambda batch: collate(batch, collate_fn_map=fast_map())):
        try:
            batch = make(samples)
            results.append((type(batch), repr(batch)))
        except Exception as error:  # noqa: BLE001  compared
            results.append((type(error), str(error)))
    assert results[0] == results[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_wait_are_counted_as_asleep(workers: int) -> None:
    class Distant(Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            time.sleep(0.02)  # longer than a busy machine lets a thread wait for a core
            return index

    loader = DataLoader(Distant(), batch_size=4, num_workers=workers)
    list(loader)
    stages = loader.statistics().stages
    assert 0 < stages.asleep_s <= stages.fetch_s + stages.collate_s


class Looked(UserDict[str, Any]):
    """Counts how often its values are asked for."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_batches_without_a_tensor_are_looked_through_ever_less_often_and_a_later_tensor_is_found() -> None:
    batch_bytes, texts = BatchBytes(), Looked(a="text", b=1)
    assert {batch_bytes.of(texts) for _ in range(200)} == {0}
    assert texts.looks <= 10
    assert [batch_bytes.of({"a": torch.zeros(2, 3)}) for _ in range(70)][-1] == 24
