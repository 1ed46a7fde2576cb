"""state_dict and load_state_dict as torchdata's StatefulDataLoader has them, beside the real package in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from penstock import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:Neither dataset nor iter"),
    pytest.mark.filterwarnings("ignore:.*made again"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
]

COUNT = 31


class Numbers(Dataset[int]):
    """Its index is the sample."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def share() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)


class Plain(IterableDataset[int]):
    """Keeps no state."""

    def __iter__(self) -> Iterator[int]:
        first, step = share()
        yield from range(first, COUNT, step)


class OfDataset(IterableDataset[int]):
    """The dataset keeps the state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        first, step = share()
        at, self.at = self.at, 0
        for number in range(first + at * step, COUNT, step):
            at += 1
            self.at = at
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Steps:
    """An iterator that keeps the state."""

    def __init__(self) -> None:
        first, self.step = share()
        self.next = first

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        if self.next >= COUNT:
            raise StopIteration
        self.next += self.step
        return self.next - self.step

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OfIterator(IterableDataset[int]):
    """Its iterator keeps the state."""

    def __iter__(self) -> Iterator[int]:
        return Steps()


class Epochs(OfDataset):
    """Counts its epochs, and its state has them."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number + 1000 * self.epoch
        self.epoch += 1

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class ToTheEnd(OfDataset):
    """Its state at the end says that nothing is left."""

    def __init__(self) -> None:
        super().__init__()
        self.begins = 0

    def __iter__(self) -> Iterator[int]:
        first, step = share()
        self.at, self.begins = self.begins, 0
        for number in range(first + self.at * step, COUNT, step):
            self.at += 1
            yield number

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


def shuffled() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"sampler": StatefulRandomSampler(range(COUNT), generator=generator)}


def distributed() -> dict[str, Any]:
    return {"sampler": StatefulDistributedSampler(Numbers(), num_replicas=2, rank=1, seed=2)}


def batched() -> dict[str, Any]:
    sampler = StatefulRandomSampler(range(COUNT), generator=torch.Generator().manual_seed(4))
    return {"batch_sampler": StatefulBatchSampler(sampler, 5, True)}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "in turn": (Numbers, lambda: {"batch_size": 4}),
    "last dropped": (Numbers, lambda: {"batch_size": 4, "drop_last": True}),
    "without batches": (Numbers, lambda: {"batch_size": None}),
    "torchdata's shuffle": (Numbers, lambda: {"batch_size": 4, **shuffled()}),
    "torchdata's ranks": (Numbers, lambda: {"batch_size": 4, **distributed()}),
    "torchdata's batches": (Numbers, batched),
    "no state": (Plain, lambda: {"batch_size": 3}),
    "the dataset's state": (OfDataset, lambda: {"batch_size": 3}),
    "the iterator's state": (OfIterator, lambda: {"batch_size": 3}),
    "the iterator's state, every third": (OfIterator, lambda: {"batch_size": 2, "snapshot_every_n_steps": 3}),
}


def rest_of(kind: type, make: Callable[[], Any], how: Callable[[], dict[str, Any]], workers: int, steps: int) -> Any:
    """Return what a loop of `steps` had, what it had then, and what another loader has after its state."""
    loader = kind(make(), num_workers=workers, **how())
    iterator = iter(loader)
    first = [plain(next(iterator)) for _ in range(steps)]
    state = copy.deepcopy(loader.state_dict())
    then = [plain(batch) for batch in iterator]
    if not then and kind is DataLoader:  # of an epoch of which nothing is left, penstock goes on with the next one
        then = [plain(batch) for batch in loader]
    other = kind(make(), num_workers=workers, **how())
    other.load_state_dict(state)
    return first, then, [plain(batch) for batch in other]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", [*CASES])
def test_what_comes_after_a_state_is_what_comes_in_torchdata(case: str, steps: int, workers: int) -> None:
    make, how = CASES[case]
    theirs = rest_of(StatefulDataLoader, make, how, workers, steps)
    ours = rest_of(DataLoader, make, how, workers, steps)
    assert ours[1] == ours[2]
    assert theirs[1] == theirs[2]
    if workers and case in ("torchdata's shuffle", "torchdata's batches"):
        return  # with workers torchdata draws an order, throws it away, and draws another
    assert ours == theirs or not theirs[1]  # its pass is empty where ours is the next epoch


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("case", [*CASES, "epochs", "to the end"])
def test_after_an_epochs_state_come_the_epochs_that_would_have_come(case: str, workers: int, persist: bool) -> None:
    how = {"num_workers": workers, "persistent_workers": persist}
    others = {"epochs": (Epochs, lambda: {"batch_size": 3}), "to the end": (ToTheEnd, lambda: {"batch_size": 3})}
    make, more = {**CASES, **others}[case]
    theirs, ours = (epochs_after(kind, make, lambda: {**more(), **how}) for kind in (StatefulDataLoader, DataLoader))
    assert ours[0] == ours[1]
    is_torchdatas_own = theirs[0] == theirs[1]  # else a resumed torchdata has an epoch that nobody would have had
    draws_twice = workers and case in ("torchdata's shuffle", "torchdata's batches")
    if is_torchdatas_own and not draws_twice:
        assert ours == theirs


def epochs_after(kind: type, make: Callable[[], Any], how: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """Return the second and third epochs of a loader, and those of one that got its state after the first."""
    loader, other = kind(make(), **how()), kind(make(), **how())
    list(loader)
    state = copy.deepcopy(loader.state_dict())
    goes_on = [[plain(batch) for batch in loader] for _ in range(2)]
    other.load_state_dict(state)
    return goes_on, [[plain(batch) for batch in other] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_taken_before_a_loop_or_twice_changes_nothing(workers: int) -> None:
    for kind in (StatefulDataLoader, DataLoader):
        loader = kind(Numbers(), 4, num_workers=workers)
        before = loader.state_dict()
        loader.load_state_dict({})
        iterator = iter(loader)
        next(iterator)
        assert loader.state_dict() == loader.state_dict()
        assert next(iterator).tolist() == [4, 5, 6, 7]
        other = kind(Numbers(), 4, num_workers=workers)
        other.load_state_dict(before)
        assert next(iter(other)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaded_state_is_told_again_before_the_loop_goes_on(workers: int) -> None:
    for kind in (StatefulDataLoader, DataLoader):
        loader = kind(Numbers(), 4, num_workers=workers)
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        state = loader.state_dict()
        other, third = (kind(Numbers(), 4, num_workers=workers) for _ in range(2))
        other.load_state_dict(state)
        third.load_state_dict(other.state_dict())
        assert next(iter(third)).tolist() == [8, 9, 10, 11]
