"""A dataset may keep a state of its own in each worker; by default the batches are torch's all the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, StackDataset, TensorDataset, default_collate, get_worker_info

from penstock import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

GLOBAL = random.Random(6)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def closure() -> Callable[[], float]:
    value = 0.5

    def draw() -> float:
        nonlocal value
        value = 3.9 * value * (1 - value)
        return value

    return draw


def transform() -> Callable[[], float]:
    generator = np.random.default_rng(5)
    return lambda: float((np.zeros(3) + generator.normal(size=3)).sum())


STATES: dict[str, Callable[[], Callable[[], float]]] = {
    "numpy generator": lambda: np.random.default_rng(1).random,
    "numpy random state": lambda: np.random.RandomState(2).rand,
    "python random": lambda: random.Random(3).random,
    "torch generator": lambda: _torch_draw(torch.Generator().manual_seed(4)),
    "counter": Counter,
    "transform": transform,
    "closure": closure,
    "module global": lambda: GLOBAL.random,
    "global states": lambda: lambda: random.random() + np.random.rand() + float(torch.rand(())),
}


def _torch_draw(generator: torch.Generator) -> Callable[[], float]:
    return lambda: float(torch.rand((), generator=generator))


class Stateful(Dataset[Any]):
    """Every sample has what each state gives next; large enough for a slot."""

    def __init__(self) -> None:
        self.states = {name: make() for name, make in STATES.items()}

    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = {name: draw() for name, draw in self.states.items()}
        return {"index": index, "image": torch.full((80, 80), float(index)), **drawn}


class OfBatches(Stateful):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        scale = self.states["counter"]()
        return [{"scale": scale, **self[index]} for index in indices]


class Stream(IterableDataset[Any]):
    """The samples of a worker's share, as a stream."""

    def __init__(self) -> None:
        self.samples = Stateful()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return (self.samples[index] for index in range(info.id, len(self.samples), info.num_workers))


class CountingCollate:
    """A collate function with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.count += 1
        return {"number": self.count, **default_collate(samples)}


def epochs_of(kind: type[TorchDataLoader], dataset: Any, stops: tuple[int, ...], **arguments: Any) -> list[str]:
    """Return the batches of an epoch for each of `stops`, which is broken off after so many."""
    GLOBAL.seed(6)
    torch.manual_seed(1)
    loader = kind(dataset, batch_size=4, **arguments)
    seen = []
    for stop in stops:
        for number, batch in enumerate(loader):
            seen.append(repr({name: values for name, values in batch.items() if name != "image"}))
            assert torch.equal(batch["image"][:, 0, 0], batch["index"].float())
            if number + 1 == stop:
                break
    return seen


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_samples_of_any_state_are_torchs(workers: int, shuffle: bool, persistent: bool) -> None:
    arguments = {"num_workers": workers, "shuffle": shuffle, "persistent_workers": persistent}
    theirs = epochs_of(TorchDataLoader, Stateful(), (99, 99), **arguments)
    assert epochs_of(DataLoader, Stateful(), (99, 99), **arguments) == theirs


def test_batches_made_in_one_call_and_a_collate_fn_with_a_state_are_torchs() -> None:
    kinds = (TorchDataLoader, DataLoader)
    seen = [epochs_of(kind, OfBatches(), (99,), num_workers=2, collate_fn=CountingCollate()) for kind in kinds]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_after_an_epoch_that_was_broken_off_they_are_torchs_too(persistent: bool, generator: bool) -> None:
    arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "shuffle": True}
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        if generator:  # how far ahead of the loop the sampler draws from it shows in the next epoch
            arguments["generator"] = torch.Generator().manual_seed(2)
        seen.append(epochs_of(kind, Stateful(), (1, 4, 7, 99), **arguments))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "dataset",
    [StackDataset(TensorDataset(torch.arange(40))), [(float(i), str(i)) for i in range(40)]],
    ids=["tensors", "list"],
)
def test_where_it_is_proven_that_there_is_no_state_batches_are_made_on_demand(dataset: Any) -> None:
    theirs = [repr(batch) for batch in TorchDataLoader(dataset, batch_size=4)]
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    assert [repr(batch) for batch in loader] == theirs
    assert loader.statistics().dispatch == "demand"
    assert "keep no state" in loader.statistics().dispatch_reason


def test_persistent_workers_of_a_stream_that_was_broken_off_keep_the_state_of_torchs() -> None:
    arguments = {"num_workers": 2, "persistent_workers": True}
    theirs = epochs_of(TorchDataLoader, Stream(), (2, 99), **arguments)
    assert epochs_of(DataLoader, Stream(), (2, 99), **arguments) == theirs


def test_a_setting_that_takes_the_proof_away_counts_from_the_next_pass_on() -> None:
    loader = DataLoader([(number,) for number in range(8)], num_workers=2)
    list(loader)
    assert loader.statistics().dispatch == "demand"
    loader.worker_init_fn = abs
    list(loader)
    assert loader.statistics().dispatch == "round_robin"
    assert "worker_init_fn" in loader.statistics().dispatch_reason


class Rewinding(IterableDataset[Any]):
    """Its own iterator, which begins again when it is asked after its end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Rewinding:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at % 4 == 0:
            raise StopIteration
        return self.at


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_worker_whose_stream_has_ended_does_not_ask_it_again(batch_size: int | None) -> None:
    def epochs(kind: type[TorchDataLoader]) -> list[Any]:
        loader = kind(Rewinding(), batch_size=batch_size, num_workers=1, persistent_workers=True, prefetch_factor=3)
        return [[batch.tolist() if batch_size else batch for batch in loader] for _ in range(3)]

    assert epochs(DataLoader) == epochs(TorchDataLoader)
