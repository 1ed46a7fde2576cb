"""States taken at the boundaries of an epoch, for every kind of sampler and dataset, beside torchdata."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from penstock import DataLoader, StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Neither dataset nor iter"),
    pytest.mark.filterwarnings("ignore:.*made again"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
]

COUNT, BATCH = 10, 4


# ── datasets ────────────────────────────────────────────────────────────────────────────────────────────────


class Numbers(Dataset[int]):
    """Its index is the sample."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Map-style, with a generator of its own, which its state holds."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.generator = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> int:
        return index + 100 * int(torch.randint(1000, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Augmented(Numbers):
    """Map-style, and random by torch's own state, which it hands out as its state."""

    def __getitem__(self, index: int) -> int:
        return index + 100 * int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class Counted(Numbers):
    """Map-style, and counts its samples."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.calls = 0

    def __getitem__(self, index: int) -> int:
        self.calls += 1
        return index + 100 * self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def share(count: int) -> range:
    info = get_worker_info()
    return range(count) if info is None else range(info.id, count, info.num_workers)


class Stream(IterableDataset[int]):
    """Keeps no state."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from share(self.count)


class StatefulStream(Stream):
    """The dataset keeps the state, and counts its epochs."""

    def __init__(self, count: int = COUNT) -> None:
        super().__init__(count)
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        numbers = share(self.count)
        while self.at < len(numbers):
            self.at += 1
            yield numbers[self.at - 1] + 1000 * self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class NoisySteps:
    """An iterator with a position and torch's random state."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> NoisySteps:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1] + 100 * int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.set_rng_state(state["torch"])


class StreamOfNoisySteps(Stream):
    """Its iterator keeps the state."""

    def __iter__(self) -> Iterator[int]:
        return NoisySteps(share(self.count))


MAPS: dict[str, Callable[[int], Any]] = {"map": Numbers, "noisy": Noisy, "augmented": Augmented, "counted": Counted}
STREAMS: dict[str, Callable[[int], Any]] = {
    "stream": Stream,
    "stateful stream": StatefulStream,
    "stateful iterator": StreamOfNoisySteps,
}


# ── samplers ────────────────────────────────────────────────────────────────────────────────────────────────


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class OfSampler(Sampler[int]):
    """The sampler keeps the state: a position, and how many epochs it has ended."""

    def __init__(self, count: int) -> None:
        self.count, self.at, self.epoch = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at += 1
            yield (self.at - 1 + self.epoch) % self.count
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Backwards:
    """An iterator that keeps the state, in an object that changes with it."""

    def __init__(self, count: int) -> None:
        self.state = {"left": [*range(count)]}

    def __iter__(self) -> Backwards:
        return self

    def __next__(self) -> int:
        if not self.state["left"]:
            raise StopIteration
        return self.state["left"].pop()

    def state_dict(self) -> dict[str, list[int]]:
        return self.state

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.state = copy.deepcopy(state)


class OfIterator(Sampler[int]):
    """Its iterator keeps the state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return Backwards(self.count)


Options = Callable[[Any], dict[str, Any]]

ORDERS: dict[str, Options] = {
    "in turn": lambda data: {"batch_size": BATCH},
    "last dropped": lambda data: {"batch_size": BATCH, "drop_last": True},
    "without batches": lambda data: {"batch_size": None},
    "sequential": lambda data: {"batch_size": BATCH, "sampler": SequentialSampler(data)},
    "random with generator": lambda data: {"batch_size": BATCH, "sampler": RandomSampler(data, generator=seeded())},
    "shuffle with generator": lambda data: {"batch_size": BATCH, "shuffle": True, "generator": seeded()},
    "replacement": lambda data: {"batch_size": BATCH, "sampler": RandomSampler(data, True, 7, generator=seeded())},
    "weighted": lambda data: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0] * len(data), 8, generator=seeded()),
    },
    "subset": lambda data: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(len(data)), generator=seeded())},
    "batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data, generator=seeded()), 3, False)},
    "list": lambda data: {"batch_size": BATCH, "sampler": [*range(len(data))][::-1]},
    "list of batches": lambda data: {"batch_sampler": [[number, 0] for number in range(len(data))]},
    "state of sampler": lambda data: {"batch_size": BATCH, "sampler": OfSampler(len(data))},
    "state of iterator": lambda data: {"batch_size": BATCH, "sampler": OfIterator(len(data))},
    "torchdata's": lambda data: {"batch_size": BATCH, "sampler": StatefulRandomSampler(data, generator=seeded())},
    "torchdata's single": lambda data: {"batch_size": None, "sampler": StatefulRandomSampler(data, generator=seeded())},
    "torchdata's batches": lambda data: {
        "batch_sampler": StatefulBatchSampler(StatefulRandomSampler(data, generator=seeded()), 3, True)
    },
}
GLOBAL: dict[str, Options] = {
    "shuffle": lambda data: {"batch_size": BATCH, "shuffle": True},
    "shuffle without batches": lambda data: {"batch_size": None, "shuffle": True},
    "random": lambda data: {"batch_size": BATCH, "sampler": RandomSampler(data)},
    "random with replacement": lambda data: {"batch_size": BATCH, "sampler": RandomSampler(data, True, 7)},
    "weighted without generator": lambda data: {
        "batch_size": BATCH,
        "sampler": WeightedRandomSampler([1.0] * len(data), 8),
    },
    "subset without generator": lambda data: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(len(data)))},
}
"""They draw from torch's own random state, so the epochs after a resumed one are anybody's."""

CUTS = ["before", 0, 1, "last", "end"]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epoch(batches: Any) -> list[Any]:
    return [plain(batch) for batch in batches]


def continued_and_resumed(kind: Any, make: Callable[[], Any], options: Options, cut: Any, *, via: str = "") -> Any:
    """Return two passes of a loop after its state was taken, and two of another loader that got the state.

    Where nothing is left of an epoch, penstock goes on with the next one, and torchdata's pass is empty: the empty pass
    is left out.

    Args:
        kind: of the loaders.
        make: returns the dataset.
        options: of the loaders, for a dataset.
        cut: the batches before the state; "before" (the loop), "last" (batch), "end" (of the pass).
        via: what the state goes through: "loaded twice", "saved at once", "begun".
    """

    def loader() -> Any:
        dataset = make()
        return kind(dataset, **options(dataset))

    torch.manual_seed(1)
    one = loader()
    iterator = None if cut == "before" else iter(one)
    if iterator is not None and cut:
        count = None if cut == "end" else len(one) if cut == "last" else cut
        epoch(itertools.islice(iterator, count))
    state = copy.deepcopy(one.state_dict())
    first = epoch(one if cut in ("before", "end") else iterator)
    nothing_left = cut not in ("before", "end") and not first
    continued = (epoch(one) if nothing_left else first), epoch(one)
    del iterator
    torch.manual_seed(2)
    other = loader()
    if via == "loaded twice":
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.load_state_dict(state)
    if via:
        if via == "begun":
            iter(other)
        state = copy.deepcopy(other.state_dict())
        if via != "loaded twice":
            other = loader()
        other.load_state_dict(state)
    resumed = epoch(other), epoch(other)
    if nothing_left and kind is StatefulDataLoader and not resumed[0]:
        resumed = resumed[1], epoch(other)
    return continued, resumed


# ── without workers: everything ─────────────────────────────────────────────────────────────────────────────

NOTHING: dict[str, Options] = {
    "nothing left": lambda data: {"batch_size": 2 * COUNT, "drop_last": True},
    "no batches": lambda data: {"batch_sampler": []},
}
VIAS = ["", "loaded twice", "saved at once", "begun"]


@pytest.mark.parametrize("order", [*ORDERS, *NOTHING])
def test_passes_after_a_state_are_those_that_would_have_come(order: str) -> None:
    options = {**ORDERS, **NOTHING}[order]
    for number, cut in enumerate(CUTS):
        for via in ("", VIAS[1 + number % 3]):
            continued, resumed = continued_and_resumed(DataLoader, Numbers, options, cut, via=via)
            assert resumed == continued, (cut, via)
        theirs = continued_and_resumed(StatefulDataLoader, Numbers, options, cut)
        is_exact = theirs[0] == theirs[1]  # torch's samplers with a generator begin anew in torchdata
        assert not is_exact or resumed == theirs[1] or order == "shuffle with generator", cut


@pytest.mark.parametrize("order", [*GLOBAL])
def test_an_order_from_torchs_own_random_state_is_resumed_at_every_boundary(order: str) -> None:
    for number, cut in enumerate(CUTS):
        for via in ("", VIAS[1 + number % 3]):
            continued, resumed = continued_and_resumed(DataLoader, Numbers, GLOBAL[order], cut, via=via)
            if cut == "last":  # the next epoch is drawn from the random state that it finds
                assert len(resumed[0]) == len(continued[0])
                continue
            assert resumed[0] == continued[0], (cut, via)


@pytest.mark.parametrize("order", ["without batches", "replacement", "state of iterator", "torchdata's"])
@pytest.mark.parametrize("data", ["augmented", "counted"])
def test_the_state_of_a_map_style_dataset_is_resumed(data: str, order: str) -> None:
    for cut, via in zip(CUTS, ["saved at once", "begun", "", "begun", "loaded twice"], strict=True):
        continued, resumed = continued_and_resumed(DataLoader, MAPS[data], ORDERS[order], cut, via=via)
        assert resumed == continued, (cut, via)
        theirs = continued_and_resumed(StatefulDataLoader, MAPS[data], ORDERS[order], cut)
        assert theirs[0] != theirs[1] or resumed == theirs[1], (cut, via)


@pytest.mark.parametrize(("data", "count"), [*((data, COUNT) for data in STREAMS), ("stateful stream", 0)])
def test_streams_are_resumed_at_every_boundary(data: str, count: int) -> None:
    def make() -> Any:
        return STREAMS[data](count)

    for cut, via in zip(["before", 0, 1, 3, "end", "end"], ["saved at once", *VIAS, ""], strict=True):
        if cut in ("before", 3, "end") and data == "stateful iterator":
            continue  # the next pass has another iterator, whatever random state this one has restored
        continued, resumed = continued_and_resumed(DataLoader, make, ORDERS["in turn"], cut, via=via)
        assert resumed == continued, (cut, via)
        theirs = continued_and_resumed(StatefulDataLoader, make, ORDERS["in turn"], cut)
        assert theirs[0] != theirs[1] or resumed == theirs[1], (cut, via)


@pytest.mark.parametrize("order", ["shuffle with generator", "state of iterator", "torchdata's single", *GLOBAL])
def test_asking_for_a_state_draws_nothing(order: str) -> None:
    def run(*, asks: bool) -> list[Any]:
        torch.manual_seed(4)
        loader: Any = DataLoader(Augmented(), **{**ORDERS, **GLOBAL}[order](Augmented()))
        seen = []
        for _ in range(2):
            if asks:
                loader.state_dict()
            for batch in loader:
                seen.append(plain(batch))
                if asks:
                    loader.state_dict()
            if asks:
                loader.state_dict()
        return seen

    assert run(asks=True) == run(asks=False)


# ── with workers ────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    data=st.sampled_from([*MAPS, *STREAMS]),
    order=st.sampled_from([*ORDERS]),
    cut=st.sampled_from(CUTS),
    via=st.sampled_from(VIAS),
    workers=st.integers(1, 2),
    persist=st.booleans(),
)
def test_workers_resume_at_every_boundary(
    data: str, order: str, cut: Any, via: str, workers: int, persist: bool
) -> None:
    make = {**MAPS, **STREAMS}[data]
    if data in STREAMS:
        order, cut = "in turn", 1 if cut == "last" else cut

    def options(dataset: Any) -> dict[str, Any]:
        return {**ORDERS[order](dataset), "num_workers": workers, "persistent_workers": persist}

    continued, resumed = continued_and_resumed(DataLoader, make, options, cut, via=via)
    # New workers are seeded from torch's own random state, which is another in the second pass.
    is_seeded_anew = data in ("augmented", "stateful iterator") and not persist
    assert resumed[0] == continued[0] or (is_seeded_anew and cut == "last")  # which goes on with the next epoch
    assert is_seeded_anew or resumed[1] == continued[1]


def test_workers_resume_a_map_style_datasets_state_as_torchdatas_do() -> None:
    def options(dataset: Any) -> dict[str, Any]:
        return {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "generator": seeded()}

    ours, theirs = (continued_and_resumed(kind, Augmented, options, "end") for kind in (DataLoader, StatefulDataLoader))
    assert ours[0] == ours[1]
    assert theirs[0] == theirs[1]
    assert ours[0][0] == theirs[0][0]


def test_a_loaded_state_begins_with_new_persistent_workers() -> None:
    loader = DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    begin = copy.deepcopy(loader.state_dict())
    first = epoch(batches)
    loader.load_state_dict(begin)
    assert epoch(loader) == first


class Deadly(Counted):
    """Kills its process at one of its samples, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 7 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_the_successor_of_a_worker_that_died_has_its_datasets_state(tmp_path: Path) -> None:
    whole = epoch(DataLoader(Counted(), 2))
    assert epoch(DataLoader(Deadly(tmp_path / "killed"), 2, num_workers=1)) == whole


def test_a_state_of_workers_is_not_resumed_by_more_or_fewer() -> None:
    loader = DataLoader(Counted(), 2, num_workers=2)
    assert DataLoader(Numbers(), 2, num_workers=2).state_dict() is not None
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match=r"in each of 2 workers .* num_workers=0; resume with as many"):
        DataLoader(Counted(), 2).load_state_dict(state)


def test_threads_have_no_state_of_a_dataset_that_they_share() -> None:
    with pytest.raises(StateError, match="threads share it"):
        DataLoader(Counted(), 2, num_workers=2, worker_type="thread").state_dict()


def test_an_error_in_a_map_style_datasets_state_is_that_of_its_batch() -> None:
    class Failing(Counted):
        def state_dict(self) -> dict[str, int]:
            if self.calls > 2:
                raise ValueError("no state any more")
            return super().state_dict()

    batches = iter(DataLoader(Failing(), 2, num_workers=1))
    assert next(batches).tolist() == [100, 201]
    with pytest.raises(ValueError, match="no state any more"):
        next(batches)


def test_dataset_and_sampler_are_looked_at_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(
        "penstock.loader.state_dict.describe_owner",
        lambda dataset, sampler, order: looked.append(dataset) or {"traits": {}},
    )
    loader = DataLoader(Numbers(), 2)
    for _ in loader:
        loader.state_dict()
    assert len(looked) == 1
