"""penstock's DataLoader gives torch's batches: same order, same types, same bytes, same random states."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_sets import Augmented, Aware, Bulk, Nested, Numbered, Stream
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import penstock
from penstock import DataLoader
from penstock.loader import dataloader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


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


def compare(dataset: Any, epochs: int = 2, **arguments: Any) -> DataLoader:
    """Run both loaders from the same seeds and compare all that can be seen."""
    seen, states, loader = [], [], None
    for kind in (TorchDataLoader, DataLoader):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        generator = torch.Generator().manual_seed(7)
        loader = kind(dataset, generator=generator, **arguments)
        seen.append([list(loader) for _ in range(epochs)])
        states.append((generator.get_state(), torch.get_rng_state(), random.getstate()))
    assert same(seen[0], seen[1])
    assert same(states[0], states[1])
    assert isinstance(loader, DataLoader)
    return loader


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([Numbered, Augmented, Aware, Bulk, Nested]),
    st.integers(1, 40),
    st.sampled_from([None, 1, 3, 8, 50]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 3),
)
def test_map_style_batches_are_torchs(
    kind, size, batch_size, shuffle, drop_last, workers, persistent, prefetch
) -> None:
    arguments: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "num_workers": workers}
    if batch_size is not None:
        arguments["drop_last"] = drop_last
    if workers:
        arguments |= {"persistent_workers": persistent, "prefetch_factor": prefetch}
    compare(kind(size), **arguments)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 40), st.sampled_from([None, 1, 4]), st.booleans(), st.integers(0, 3), st.booleans())
def test_iterable_batches_are_torchs(size, batch_size, drop_last, workers, persistent) -> None:
    arguments: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    if batch_size is not None:
        arguments["drop_last"] = drop_last
    if workers:
        arguments["persistent_workers"] = persistent
    compare(Stream(size), **arguments)


def test_random_augmentations_of_a_long_epoch_are_torchs() -> None:
    compare(Augmented(64), batch_size=8, shuffle=True, num_workers=2)
    compare(Augmented(200), batch_size=8, shuffle=True, num_workers=3)


def test_random_augmentations_of_large_batches_are_torchs() -> None:
    loader = compare(Augmented(60, (3, 64, 64)), batch_size=16, shuffle=True, num_workers=3)
    assert loader.statistics().dispatch == "round_robin"
    assert loader.statistics().dispatch_reason == "as torch assigns, because Augmented may keep a state"


def test_by_the_users_word_any_free_worker_makes_the_next_batch() -> None:
    theirs = TorchDataLoader(Numbered(60, (3, 64, 64)), batch_size=16)
    loader = DataLoader(Numbered(60, (3, 64, 64)), batch_size=16, num_workers=3, dispatch="demand")
    assert same(list(loader), list(theirs))
    assert (loader.statistics().dispatch, loader.statistics().dispatch_reason) == ("demand", "asked for")


def seed_as_told(worker: int) -> None:
    torch.manual_seed(12345 + worker)


def double(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return {"images": images * 2, "labels": labels, "same": [images, images]}


WEIGHTS = torch.arange(1.0, 31.0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4, "collate_fn": double},
        {"batch_size": 4, "worker_init_fn": seed_as_told},
        {"batch_sampler": [[1, 2], [3], [4, 5, 6], []][:3]},
        {"batch_size": 7, "sampler": list(range(29, -1, -1))},
        {"batch_size": None, "sampler": [3, 1, 2]},
        {"batch_size": 5, "sampler": WeightedRandomSampler(WEIGHTS, 20)},
        {"batch_size": 5, "sampler": SubsetRandomSampler(range(10))},
        {"batch_size": 5, "in_order": False},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_arguments_mean_what_they_mean_to_torch(workers: int, arguments: dict[str, Any]) -> None:
    if workers and "in_order" in arguments:
        got = list(DataLoader(Numbered(30), num_workers=workers, **arguments))
        assert sorted(int(i) for _, labels in got for i in labels) == list(range(30))
        return
    compare(Augmented(30) if "worker_init_fn" in arguments else Numbered(30), num_workers=workers, **arguments)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.randn(30, 4, 90), torch.arange(30)),
        Subset(Numbered(50), list(range(5, 35))),
        ConcatDataset([Numbered(10), Numbered(20)]),
        [torch.full((70, 70), float(i)) for i in range(30)],
        ["a", "bc", "d"] * 10,
        [{"x": i, "y": [i, float(i)]} for i in range(30)],
    ],
    ids=lambda dataset: type(dataset).__name__,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_of_torch_and_plain_lists_work(dataset: Any, workers: int) -> None:
    compare(dataset, batch_size=8, shuffle=True, num_workers=workers)


def test_samples_of_different_keys_or_sizes_end_as_in_torch() -> None:
    grown = [{"a": torch.full((80, 80), float(i)), **({"b": torch.zeros(90, 90)} if i > 7 else {})} for i in range(16)]
    compare(grown, batch_size=16, num_workers=2)
    ragged = [torch.zeros(90, 90 + (i > 7)) for i in range(16)]
    # torch without workers: when they fail, its queue's own thread may raise as well ("Bad file descriptor").
    for kind, workers in ((TorchDataLoader, 0), (DataLoader, 2)):
        with pytest.raises(
            RuntimeError, match=r"stack expects each tensor to be equal size, but got \[90, 90\] at entry 0"
        ):
            list(kind(ragged, batch_size=16, num_workers=workers))


@pytest.mark.parametrize("sample", [None, torch.eye(90).to_sparse(), {"set"}])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_collated_fail_as_in_torch(sample: Any, workers: int) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        list(TorchDataLoader([sample] * 8, batch_size=4))
    with pytest.raises(type(theirs.value)) as ours:
        list(DataLoader([sample] * 8, batch_size=4, num_workers=workers))
    assert str(theirs.value).splitlines()[0] in str(ours.value)
    assert not workers or "in DataLoader worker process " in str(ours.value)  # whichever took the batch


def test_threads_give_torchs_batches() -> None:
    expected = list(TorchDataLoader(Numbered(50, (3, 64, 64)), batch_size=8))
    assert same(
        expected, list(DataLoader(Numbered(50, (3, 64, 64)), batch_size=8, num_workers=3, worker_type="thread"))
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_kept_batches_stay_right(workers: int) -> None:
    loader = DataLoader(Numbered(8 * 65, (3, 128, 128)), batch_size=8, num_workers=workers, ring_bytes=7 << 20)
    batches = list(loader)
    counts = loader.statistics().ring
    assert counts.nbytes <= counts.budget_nbytes
    assert counts.copied_out > 0
    del loader
    for number, (images, labels) in enumerate(batches):
        assert labels.tolist() == list(range(8 * number, 8 * number + 8))
        assert torch.equal(images[:, 0, 0, 0], labels.float())


def test_batches_may_be_written_to() -> None:
    for images, labels in DataLoader(Numbered(64, (3, 64, 64)), batch_size=8, num_workers=2):
        assert torch.equal(images[:, 2, 63, 63], labels.float())
        images.add_(1000)


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_of_one_loader_live_side_by_side(workers: int) -> None:
    loader = DataLoader(Numbered(40), batch_size=4, num_workers=workers)
    pairs = zip(iter(loader), iter(loader), strict=True)
    assert all(same(a, b) for a, b in pairs)
    inner = [int(y[0]) for x, _ in zip(loader, range(2), strict=False) for _, y in loader]
    assert inner == [*range(0, 40, 4)] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_a_broken_off_epoch_leaves_the_next_one_whole(persistent: bool) -> None:
    loader = DataLoader(Numbered(60, delay_s=0.001), batch_size=4, num_workers=2, persistent_workers=persistent)
    for stop in (0, 3, 14):
        for number, (_, labels) in enumerate(loader):
            assert labels.tolist() == list(range(4 * number, 4 * number + 4))
            if number == stop:
                break
    assert [int(label) for _, labels in loader for label in labels] == list(range(60))


def test_num_workers_auto_loads() -> None:
    loader = DataLoader(Numbered(20), batch_size=4, num_workers="auto")
    assert loader.num_workers >= 0
    assert len(list(loader)) == 5


def test_pin_memory_without_an_accelerator_warns_as_torch_does() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.warns(UserWarning, match="no accelerator is found"):
        assert len(list(DataLoader(Numbered(4), pin_memory=True))) == 4


def test_a_loader_can_be_pickled() -> None:
    import pickle

    loader = DataLoader(Numbered(8), batch_size=4)
    list(loader)
    assert same(list(pickle.loads(pickle.dumps(loader))), list(loader))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_batch_sampler_that_draws_when_its_iterator_is_made_gives_torchs_batches(
    workers: int, persistent: bool
) -> None:
    class Eager(Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return iter([batch.tolist() for batch in torch.randperm(8).split(2)])

    def epochs(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(range(8), batch_sampler=Eager(), num_workers=workers, persistent_workers=persistent)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    assert epochs(DataLoader) == epochs(TorchDataLoader)


class FailingSampler(Sampler[int]):
    """Draws 0 to 8, and raises in place of those in `failing`; each of its iterators may be asked again."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        self._failing = failing

    def __iter__(self) -> Iterator[int]:
        return map(self._draw, range(9))

    def _draw(self, index: int) -> int:
        if index in self._failing:
            raise LookupError(f"no index {index}")
        return index


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("failing", [(0,), (4, 6), (*range(2, 9),)])
def test_an_error_of_the_sampler_comes_when_torch_asks_it_and_in_place_of_the_same_batch(
    failing: tuple[int, ...], workers: int, persistent: bool
) -> None:
    def seen(kind: Any) -> list[Any]:
        sampler = FailingSampler(failing)
        loader = kind(range(9), None, sampler=sampler, num_workers=workers, persistent_workers=persistent)
        result: list[Any] = []
        for _ in range(2):
            try:
                batches = iter(loader)
            except LookupError as error:
                result.append(f"before the first batch: {error!r}")
                continue
            for _ in range(10):
                try:
                    result.append(next(batches))
                except (LookupError, StopIteration) as error:
                    result.append(repr(error))
        return result

    assert seen(DataLoader) == seen(TorchDataLoader)


class Learned(Numbered):
    """Samples that require grad: leaves, or computed from one."""

    def __init__(self, count: int, size: int, *, is_leaf: bool) -> None:
        super().__init__(count)
        self._size = size
        self._is_leaf = is_leaf

    def __getitem__(self, index: int) -> Any:
        leaf = torch.full((self._size,), float(index), requires_grad=True)
        return leaf if self._is_leaf else leaf * 2


@pytest.mark.parametrize("size", [3, 10_000])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_samples_that_require_grad_are_not_stacked_in_workers_as_with_torch(size: int, is_leaf: bool) -> None:
    loader = DataLoader(Learned(4, size, is_leaf=is_leaf), batch_size=2, num_workers=1)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        next(iter(loader))


@pytest.mark.parametrize("size", [3, 10_000])
def test_a_leaf_that_requires_grad_travels_and_what_was_computed_from_one_does_not(size: int) -> None:
    leaves = DataLoader(Learned(1, size, is_leaf=True), batch_size=None, num_workers=1)
    assert [(leaf.requires_grad, leaf.is_leaf) for leaf in leaves] == [(True, True)]
    computed = DataLoader(Learned(1, size, is_leaf=False), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        next(iter(computed))  # torch's loader waits for ever, and the worker prints the same


@pytest.mark.parametrize("workers", [0, 1])
def test_arrays_without_elements_are_stacked_with_torchs_strides(workers: int) -> None:
    compare([(np.zeros((0, 2)), np.zeros((3, 0), np.int32)) for _ in range(4)], batch_size=2, num_workers=workers)


class OddBatches:
    """Batches of indices in whatever can be iterated."""

    def __iter__(self) -> Iterator[Any]:
        yield {1, 2}
        yield dict.fromkeys([3, 4])
        yield iter([5, 6])
        yield np.array([7, 8])
        yield torch.tensor([9, 10])
        yield range(3)


class Keeping(Numbered):
    """Has a state that it is asked for."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset",
    [Numbered(11), Bulk(11), Keeping(11), TensorDataset(torch.arange(11))],
    ids=lambda one: type(one).__name__,
)
def test_a_batch_of_indices_may_be_anything_that_can_be_iterated(dataset: Any, workers: int) -> None:
    theirs = TorchDataLoader(dataset, batch_sampler=OddBatches())
    assert same(list(DataLoader(dataset, batch_sampler=OddBatches(), num_workers=workers)), list(theirs))


def test_a_set_of_indices_is_in_the_order_that_it_has_in_torchs_workers() -> None:
    compare(range(22), batch_sampler=[{5, 10, 21, 13}], num_workers=1)  # pickling changes it


class Columns(Numbered):
    """Makes all samples of a batch as something else than a list."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices) if indices[0] else {"index": np.array(indices), "more": 1, "and": 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_make_a_whole_batch_as_anything(workers: int) -> None:
    compare(Columns(8), batch_size=4, collate_fn=double_of, num_workers=workers)


def double_of(batch: Any) -> Any:
    return [batch, batch]


def test_an_iterator_is_known_as_a_loaders() -> None:
    assert isinstance(iter(DataLoader(range(3))), _BaseDataLoaderIter)  # Lightning leaves such out of its pickles


class _Endless:
    """A batch sampler that begins again, as Ultralytics' does."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batch_sampler


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_is_set_past_torchs_refusal_counts_as_it_does_with_torchs(workers: int) -> None:
    def three_epochs(loader_class: Any) -> list[list[float]]:
        torch.manual_seed(0)
        loader = loader_class(
            torch.utils.data.TensorDataset(torch.arange(12.0)), batch_size=4, shuffle=True, num_workers=workers
        )
        object.__setattr__(loader, "batch_sampler", _Endless(loader.batch_sampler))
        return [batch.tolist() for (batch,) in itertools.islice(loader, 9)]

    assert three_epochs(DataLoader) == three_epochs(TorchDataLoader)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_sampler_that_is_put_into_the_batch_sampler_draws_the_next_pass(workers: int, persistent: bool) -> None:
    def passes(loader_class: Any) -> list[list[list[float]]]:
        torch.manual_seed(0)
        loader = loader_class(
            TensorDataset(torch.arange(12.0)),
            batch_sampler=BatchSampler(SubsetRandomSampler(range(12)), 2, drop_last=False),
            num_workers=workers,
            persistent_workers=persistent,
        )
        seen = []
        for sampler in SubsetRandomSampler([1, 2, 3]), WeightedRandomSampler([0.0, 0.5], 6), RandomSampler(range(7)):
            loader.batch_sampler.sampler = sampler
            seen.append([batch.tolist() for (batch,) in loader])
        return seen

    assert passes(DataLoader) == passes(TorchDataLoader)


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(40.0)), Numbered(40)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sampler", [None, SubsetRandomSampler(range(40)), SequentialSampler(range(40))])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_size_that_is_set_in_the_middle_of_a_pass_cuts_the_rest_of_it(
    workers: int, sampler: Any, drop_last: bool, dataset: Any
) -> None:
    def batches(loader_class: Any) -> list[Any]:
        torch.manual_seed(0)
        shuffle = sampler is None
        loader = loader_class(dataset, 2, shuffle, sampler, drop_last=drop_last, num_workers=workers)
        seen = []
        for batch in loader:
            seen.append(batch)
            loader.batch_sampler.batch_size = 3 + len(seen) % 4
        return seen

    assert same(batches(DataLoader), batches(TorchDataLoader))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_size_of_0_that_is_set_in_a_pass_ends_it(shuffle: bool) -> None:
    def batches(loader_class: Any) -> int:
        loader = loader_class(TensorDataset(torch.arange(40.0)), 2, shuffle)
        seen = 0
        for _ in itertools.islice(loader, 50):
            seen += 1
            loader.batch_sampler.batch_size = 0
        return seen

    assert batches(DataLoader) == batches(TorchDataLoader) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_is_set_past_torchs_refusal_gives_the_next_pass(workers: int) -> None:
    def passes(loader_class: Any) -> list[list[float]]:
        loader = loader_class(TensorDataset(torch.arange(6.0)), batch_size=4, num_workers=workers)
        seen = [batch.tolist() for (batch,) in loader]
        loader._DataLoader__initialized = False
        loader.dataset = TensorDataset(torch.arange(6.0) + 10)
        return seen + [batch.tolist() for (batch,) in loader]

    assert passes(DataLoader) == passes(TorchDataLoader)


def inputs_and_targets(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.stack([image for image, _ in samples]).flatten(1)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_views_is_written_to_as_with_torch(workers: int) -> None:
    seen = []
    for kind in (TorchDataLoader, DataLoader):
        for inputs, targets in kind(Numbered(8), batch_size=4, num_workers=workers, collate_fn=inputs_and_targets):
            before = inputs.clone()
            targets.fill_(-1)
            seen.append((before, inputs, inputs.stride(), targets.storage_offset()))
    assert same(seen[:2], seen[2:])


class Raised(Numbered):
    """Sample i is an image filled with i and what the dataset is raised by, which a program may set."""

    by = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full(self.shape, float(index + self.by))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_a_forked_process_holds_stays_as_it_is(workers: int) -> None:
    context = multiprocessing.get_context("fork")
    go, results = context.Event(), context.SimpleQueue()

    def read(batch: torch.Tensor) -> None:
        go.wait()
        results.put(batch[:, 0, 0, 0].tolist())

    batches = iter(DataLoader(Raised(96), batch_size=4, num_workers=workers))
    held = [next(batches) for _ in range(2)]
    child = context.Process(target=read, args=(held[1],))
    child.start()
    held.clear()
    for _ in batches:
        pass
    go.set()
    assert results.get() == [4.0, 5.0, 6.0, 7.0]
    child.join()


def test_a_loop_in_a_forked_process_leaves_the_programs_batches_as_they_are() -> None:
    context = multiprocessing.get_context("fork")
    dataset = Raised(64)
    expected = [float(index) for index in range(0, 64, 4)]
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    assert [batch[0, 0, 0, 0].item() for batch in loader] == expected  # its slots are kept for its next loop
    mine, theirs = context.Pipe()

    def loop() -> None:
        dataset.by = 1_000
        for batch in loader:
            theirs.send(batch[0, 0, 0, 0].item())
            theirs.recv()

    child = context.Process(target=loop)
    child.start()
    for number, batch in zip(expected, loader, strict=True):  # both at once, batch by batch
        assert mine.recv() == number + 1_000
        assert bool((batch[:, 0, 0, 0] == number + torch.arange(4)).all())
        mine.send(None)
    child.join()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_sampler_may_yield_tensors_and_arrays_of_one_index(make: Any, workers: int) -> None:
    loader = DataLoader(range(3, 9), sampler=[make(2), make(0)], batch_size=None, num_workers=workers)
    assert [*loader] == [*TorchDataLoader(range(3, 9), sampler=[make(2), make(0)], batch_size=None)] == [5, 3]


@pytest.mark.parametrize("side", [4, 64])
def test_channels_last_samples_have_torchs_strides_from_a_worker(side: int) -> None:
    samples = [torch.rand(2, 3, side, side).to(memory_format=torch.channels_last) for _ in range(3)]
    for workers in (0, 1):
        compare(samples, batch_size=2, num_workers=workers)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_dimension_of_one_keeps_the_stride_that_torch_gives_it_in_a_worker(batch_size: int | None) -> None:
    samples = [torch.rand(2, 1, 4, 4).to(memory_format=torch.channels_last) for _ in range(3)]
    samples += [torch.randn(20).as_strided((1, 20), (7, 1))]
    for workers in (0, 1):
        compare(samples, batch_size=batch_size, num_workers=workers, collate_fn=default_convert)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("of", ["mixture", "stream"])
def test_in_the_place_of_torchs_loader_no_pass_is_another_epoch_than_with_torchs(
    of: str, persistent: bool, workers: int
) -> None:
    def passes(kind: Any) -> list[list[int]]:
        dataset: Any
        if of == "mixture":
            dataset = penstock.mix([(range(30), 2), (range(100, 120), 1)], shuffle=True).map(int)
        else:
            dataset = ThirtyNumbers().stream().shuffle(seed=3, shuffle_block=8)
        loader = kind(dataset, batch_size=4, num_workers=workers, persistent_workers=persistent and workers > 0)
        found = []
        for epoch in (None, None, 4, None):
            if epoch is not None:
                dataset.set_epoch(epoch)
            found.append([number for batch in loader for number in batch.tolist()])
        return found

    assert passes(dataloader.DataLoader) == passes(TorchDataLoader)
    first, second, *_ = passes(DataLoader)
    assert first != second


class ThirtyNumbers(penstock.Source):
    def __len__(self) -> int:
        return 30

    def read(self, index: int) -> int:
        return index
