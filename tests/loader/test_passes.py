"""A pass takes over what the one before has made, and nobody can tell but by the time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock import DataLoader


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([index, index * index]), "n": index}


class Once(IterableDataset[int]):
    """Counts its passes, and how many of their iterators were closed."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from range(100 * self.passes, 100 * self.passes + 5)


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(7), torch.arange(7) / 2)


def seen(batches: Any) -> list[str]:
    return [repr(batch) for batch in batches]


def test_a_pass_has_the_parts_of_the_one_before() -> None:
    loader = DataLoader(tensors(), batch_size=2, shuffle=True)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert second.pipeline is not first.pipeline  # that one is still going
    list(second)
    assert iter(loader).pipeline is second.pipeline
    loader.collate_fn = list
    assert iter(loader).pipeline is not second.pipeline  # a program has set something


@pytest.mark.parametrize("make", [tensors, Squares, Once, lambda: list(range(7))])
def test_loops_inside_of_each_other_are_torchs(make: Callable[[], Any]) -> None:
    found = []
    for kind in (TorchDataLoader, DataLoader):
        loader, lines = kind(make(), batch_size=3), []
        for _ in range(2):
            for outer in loader:
                lines += [repr((outer, inner)) for inner in loader]
            lines += [repr(both) for both in zip(loader, loader, strict=True)]
            lines += [repr(next(iter(loader))) for _ in range(3)]
        found.append(lines)
    assert found[0] == found[1]


def test_a_pass_after_an_error_is_whole() -> None:
    class Failing(Squares):
        fails = True

        def __getitem__(self, index: int) -> Any:
            if index == 4 and self.fails:
                raise ValueError("sample 4")
            return super().__getitem__(index)

    data = Failing()
    loader = DataLoader(data, batch_size=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="sample 4"):
            list(loader)
    data.fails = False
    assert seen(loader) == seen(TorchDataLoader(data, batch_size=2))


def _give_a_gradient(data: Any, loader: Any) -> None:
    data.tensors[1].requires_grad_()


def _replace_a_tensor(data: Any, loader: Any) -> None:
    data.tensors = (data.tensors[0] + 10, data.tensors[1])


def _narrow_a_tensor(data: Any, loader: Any) -> None:
    data.tensors[0].data = data.tensors[0].to(torch.int16)


def _give_bulk(data: Any, loader: Any) -> None:
    data.__getitems__ = lambda indices: [(index, -index) for index in indices]


def _set_collate(data: Any, loader: Any) -> None:
    loader.collate_fn = len


@pytest.mark.parametrize(
    "change",
    [_give_a_gradient, _replace_a_tensor, _narrow_a_tensor, _give_bulk, _set_collate],
    ids=lambda one: one.__name__,
)
def test_what_changes_between_two_passes_counts(change: Callable[[Any, Any], None]) -> None:
    found = []
    for kind in (TorchDataLoader, DataLoader):
        data = tensors()
        loader = kind(data, batch_size=3)
        before = seen(loader)
        change(data, loader)
        found.append((before, seen(loader), seen(loader)))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_collate_function_that_is_put_into_torchs_map_counts_from_the_next_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(Subset(tensors(), [3, 4]), batch_size=2)
    before = seen(loader)
    with monkeypatch.context() as patched:
        patched.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "mine")
        assert list(loader) == [["mine", "mine"]]
    assert seen(loader) == before


def test_a_stream_is_begun_once_for_each_pass() -> None:
    data = Once()
    loader = DataLoader(data, batch_size=2)
    assert [[batch.tolist() for batch in loader][-1] for _ in range(3)] == [[104], [204], [304]]
    assert data.passes == 3


class Gated(Dataset[int]):
    """Waits before its later samples until it may make them."""

    def __init__(self) -> None:
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index >= 8 and not self.may_go_on.is_set():
            self.is_asked.set()
            assert self.may_go_on.wait(60)
        return index


def test_a_thread_that_still_reads_ahead_takes_no_batch_of_the_next_pass() -> None:
    dataset = Gated()
    loader = DataLoader(dataset, 2, num_workers=1, worker_type="thread", persistent_workers=True)
    first, ahead, has_begun = iter(loader), list[list[int]](), threading.Event()
    reader = threading.Thread(target=lambda: ahead.extend(batch.tolist() for batch in first))
    reader.start()
    assert dataset.is_asked.wait(60)  # the reader waits for a batch, or soon will
    passes: list[Any] = []

    def begin() -> None:
        passes.append(iter(loader))
        has_begun.set()

    starter = threading.Thread(target=begin)
    starter.start()
    has_begun.wait(0.2)  # what is not held back begins meanwhile
    dataset.may_go_on.set()
    starter.join()
    assert [batch.tolist() for batch in passes[0]] == [[first, first + 1] for first in range(0, 40, 2)]
    reader.join()
    assert ahead == [[first, first + 1] for first in range(0, 2 * len(ahead), 2)]
    assert loader._iterator is passes[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_iterators_of_workers_that_persist_are_one_to_the_thread_that_goes_on_with_them() -> None:
    taken = []
    for kind in (TorchDataLoader, DataLoader):
        loader = kind(range(8), 2, num_workers=1, persistent_workers=True)
        first = iter(loader)
        begun = next(first).tolist()
        second = iter(loader)
        taken.append([begun, next(first).tolist(), next(second).tolist(), next(first).tolist()])
    assert taken[1] == taken[0] == [[0, 1], [0, 1], [2, 3], [4, 5]]
