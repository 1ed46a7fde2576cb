"""Batches of data in memory are gathered, and equal torch's: bytes, dtypes, strides, containers, order and draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sample_sets import Numbered
from test_against_torch import compare, same
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, Subset, TensorDataset, random_split
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock import DataLoader
from penstock.loader.collate import fast_map
from penstock.loader.in_memory import CannotGatherError, gather_of

X = torch.randn(23, 3, generator=torch.Generator().manual_seed(1))
PAIR = TensorDataset(X, torch.arange(23) % 4)


def _memory_mapped(folder: Any) -> np.memmap:
    np.save(folder / "rows.npy", X.numpy())
    return np.load(folder / "rows.npy", mmap_mode="r")


GATHERED = {
    "tensors": PAIR,
    "one tensor": X,
    "a column": X[:, 0],
    "bool": TensorDataset(X > 0),
    "bytes": torch.arange(23, dtype=torch.uint8),
    "complex": torch.complex(X, X),
    "bfloat16": X.bfloat16(),
    "transposed": torch.randn(5, 23).t(),
    "expanded": torch.arange(3.0).expand(23, 3),
    "channels last": torch.randn(23, 3, 4, 4).to(memory_format=torch.channels_last),
    "an array": X.numpy(),
    "a column of an array": X.numpy()[:, 1],
    "float16 scalars": X.numpy().astype(np.float16)[:, 1],
    "every other row": X.numpy()[::2],
    "subset": Subset(PAIR, [5, 3, 3, 22, 0]),
    "subset by numbers below 0": Subset(PAIR, [-1, 2, -3]),
    "subset by a range": Subset(PAIR, range(20, 3, -2)),
    "subset by a tensor": Subset(PAIR, torch.tensor([4, 1, 9])),
    "subset by an array": Subset(PAIR, np.array([4, 1, 9])),
    "subset of a subset": Subset(Subset(PAIR, [7, 8, 9, 10]), [3, 0, 1]),
    "a split": random_split(PAIR, [0.5, 0.5], torch.Generator().manual_seed(3))[1],
    "concat": ConcatDataset([PAIR, Subset(PAIR, [1, 2]), TensorDataset(X[:1], torch.tensor([9]))]),
    "concat of arrays": ConcatDataset([X.numpy(), X.numpy()[:4]]),
    "subset of a concat": Subset(ConcatDataset([PAIR, PAIR]), [0, 22, 23, 45, 1]),
}
NOT_GATHERED = {
    "gradients": TensorDataset(X.clone().requires_grad_()),
    "sparse": X.to_sparse(),
    "conjugate": torch.complex(X, X).conj(),
    "unsigned scalars": np.arange(9, dtype=np.uint16),
    "parts of other dtypes": ConcatDataset([X, X.double()]),
    "parts of other sizes": ConcatDataset([TensorDataset(X), X]),
    "a subclass": type("Mine", (TensorDataset,), {})(X),
    "objects": np.array([1, "a"], dtype=object),
}


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": 1, "shuffle": True},
        {"batch_size": None, "shuffle": True},
    ],
)
def test_gathered_batches_are_torchs(name: str, arguments: dict[str, Any]) -> None:
    assert gather_of(GATHERED[name]) is not None
    compare(GATHERED[name], **arguments)


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_what_is_not_proven_is_fetched_as_torch_fetches_it(name: str) -> None:
    assert gather_of(NOT_GATHERED[name]) is None
    results = []
    for kind in (TorchDataLoader, DataLoader):
        try:
            results.append(list(kind(NOT_GATHERED[name], batch_size=3)))
        except Exception as error:  # noqa: BLE001  compared
            results.append((type(error), str(error)))
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], tuple):
        assert results[0] == results[1]
    else:
        assert all(map(same, results[0], results[1]))


def test_a_memory_mapped_array_is_gathered(tmp_path: Any) -> None:
    rows = _memory_mapped(tmp_path)
    assert gather_of(rows) is not None
    batches = list(DataLoader(rows, batch_size=5))
    assert torch.equal(torch.cat(batches), X)


@pytest.mark.parametrize("count", [8, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_generator_is_drawn_from_when_torch_draws(count: int, drop_last: bool) -> None:
    def states(kind: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(range(count), generator=generator)
        loader = kind(X[:count], batch_sampler=BatchSampler(sampler, 4, drop_last))
        found = []
        for _ in range(2):
            batches = iter(loader)
            found.extend((batch, generator.get_state()) for batch in batches)
            found.append((torch.empty(0), generator.get_state()))
        return found

    assert same(states(TorchDataLoader), states(DataLoader))


@pytest.mark.parametrize(
    "sampler",
    [
        [3, -1, 0, 22],
        [torch.tensor(2), torch.tensor(1)],
        [np.int64(2), np.int64(1)],
        [True, True],
        RandomSampler(PAIR, replacement=True, num_samples=70),
        RandomSampler(PAIR, num_samples=50),
    ],
    ids=["negative", "tensors", "NumPy", "bool", "replacement", "more than all"],
)
def test_odd_indices_mean_what_they_mean_to_torch(sampler: Any) -> None:
    compare(PAIR, sampler=sampler, batch_size=4)


@pytest.mark.parametrize("batches", [[[0, 1], (2,)], [torch.tensor([3, 1])], [range(3)], [[]]])
def test_odd_batches_of_indices_mean_what_they_mean_to_torch(batches: Any) -> None:
    if batches == [[]]:
        for kind in (TorchDataLoader, DataLoader):
            with pytest.raises(IndexError):
                list(kind(PAIR, batch_sampler=batches))
        return
    compare(PAIR, batch_sampler=batches)


def test_an_index_that_is_out_of_range_raises_what_torch_raises() -> None:
    messages = []
    for kind in (TorchDataLoader, DataLoader):
        with pytest.raises(IndexError) as caught:
            list(kind(PAIR, sampler=[1, 23], batch_size=2))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_writing_to_a_batch_leaves_the_dataset_as_it_is() -> None:
    dataset = TensorDataset(X.clone(), torch.arange(23))
    for loader in (DataLoader(dataset, batch_size=23), DataLoader(dataset, batch_size=23, num_workers=2)):
        for batch in loader:
            batch[0].zero_()
            batch[1].zero_()
    assert torch.equal(dataset.tensors[0], X)
    assert dataset.tensors[1].tolist() == list(range(23))


def test_a_dataset_that_changes_during_the_epoch_changes_as_in_torch() -> None:
    def run(kind: Any) -> list[Any]:
        dataset = TensorDataset(X.clone())
        subset = Subset(dataset, list(range(12)))
        found = []
        for number, batch in enumerate(kind(subset, batch_size=3)):
            found.append(batch)
            if number == 0:
                subset.indices[3:6] = [20, 21, 22]
            elif number == 1:
                dataset.tensors = (X.double(), X)
            elif number == 2:
                subset.dataset = TensorDataset(X + 1)
        return found

    assert same(run(TorchDataLoader), run(DataLoader))


def test_a_gather_refuses_what_is_not_a_whole_number_from_0() -> None:
    gather = gather_of(PAIR)
    assert gather is not None
    for indices in ([-1], [23], [True], [1.0], ["a"]):
        with pytest.raises(CannotGatherError):
            gather(indices)


def test_with_another_default_device_torch_makes_the_batches() -> None:
    with torch.device("meta"):
        assert gather_of(PAIR) is None
        assert fast_map() == default_collate_fn_map
    assert gather_of(PAIR) is not None


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("part", [TensorDataset(torch.arange(2)), Numbered(2, (1,))], ids=["in memory", "a program's"])
def test_datasets_that_were_added_one_by_one_are_as_deep_as_torch_can_read_them(part, num_workers: int) -> None:
    dataset = part
    for _ in range(700):
        dataset = dataset + part
    theirs, own = (
        TorchDataLoader(dataset, 64, num_workers=num_workers),
        DataLoader(dataset, 64, num_workers=num_workers),
    )
    for expected, batch in zip(theirs, own, strict=True):
        assert all(map(torch.equal, expected, batch))
