"""What a program keeps of every step, in the training process."""

# ruff: noqa: PERF401 (the loops are those that programs have)

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes.steps.memory_growth import MemoryWatch
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.record.finding import Finding

_NUMBERS = 1 << 18
_module_history: list[torch.Tensor] = []


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return the functions of this file that run."""
    own = []
    while frame is not None and frame.f_code.co_filename == __file__:
        own.append(frame)
        frame = frame.f_back
    return own


class Watched:
    """Stands for the examined loader: windows of 4 batches, without end for the loop, until the watch is over."""

    def __init__(self) -> None:
        self.found: MemoryGrowth | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        watch = MemoryWatch()
        for _ in range(4):
            watch.begin_window(_frames(sys._getframe(1)))
            for _ in range(4):
                yield torch.rand(_NUMBERS)
            watch.end_window(4, _frames(sys._getframe(1)))
        self.found = watch.result(_frames(sys._getframe(1)))


def _keeps_in_a_list(batches: Watched) -> None:
    history = []
    for _ in range(1):
        for batch in batches:
            history.append(batch * 2)


def _keeps_for_an_epoch(batches: Watched) -> None:
    for _ in range(1):
        outputs = []
        for batch in batches:
            outputs.append(batch * 2)
        torch.cat(outputs)


def _keeps_in_a_function_of_one_epoch(batches: Watched) -> None:
    doubled = []
    for batch in batches:
        doubled.append(batch * 2)


def _keeps_losses(batches: Watched) -> None:
    weight = torch.ones(_NUMBERS, requires_grad=True)
    for _ in range(1):
        norms = []
        for batch in batches:
            (gradient,) = torch.autograd.grad((weight * batch).square().sum(), weight, create_graph=True)
            norms.append(gradient.square().sum())


class Untouchable:
    """Does not let itself be asked for anything."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(name)

    def __sizeof__(self) -> int:
        raise RuntimeError

    __eq__ = __len__ = __iter__ = __repr__ = __sizeof__  # type: ignore[assignment]
    __hash__ = object.__hash__


class UntouchableList(list[Any]):
    """Does not let itself be iterated."""

    __len__ = __iter__ = Untouchable.__sizeof__  # type: ignore[assignment]


class UntouchableDict(dict[Any, Any]):
    """Does not give its values."""

    __len__ = items = values = keys = Untouchable.__sizeof__  # type: ignore[assignment]


def _keeps_beside_untouchable_objects(batches: Watched) -> None:
    one = Untouchable()
    beside, table, pairs = UntouchableList([one]), UntouchableDict({one: one}), []
    for _ in range(1):
        for batch in batches:
            pairs.append((one, batch * 2))
            list.append(beside, one)
            dict.__setitem__(table, id(batch), one)


def _keeps_in_the_module(batches: Watched) -> None:
    for batch in batches:
        _module_history.append(batch * 2)


def _keeps_in_a_default_value(batches: Watched) -> None:
    for batch in batches:
        _remember(batch)


def _remember(batch: torch.Tensor, seen: list[torch.Tensor] = []) -> None:  # noqa: B006 (the fault)
    seen.append(batch * 2)


def _keeps_in_a_closure(batches: Watched) -> None:
    def make() -> Callable[[torch.Tensor], None]:
        stored: dict[int, torch.Tensor] = {}
        return lambda batch: stored.update({len(stored): batch * 2})

    store = make()
    for batch in batches:
        store(batch)


class Attentive(torch.nn.Module):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[torch.Tensor] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.maps.append(batch * 2)
        return batch


def _keeps_in_a_layer(batches: Watched) -> None:
    model = torch.nn.Sequential(Attentive())
    for batch in batches:
        model(batch)


def _keeps_in_a_cache(batches: Watched) -> None:
    for batch in batches:
        _cached(batch)


@functools.cache
def _cached(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


def _keeps_the_last_ones(batches: Watched) -> None:
    last: deque[torch.Tensor] = deque(maxlen=3)
    for batch in batches:
        last.append(batch)


def _keeps_numbers(batches: Watched) -> None:
    losses = []
    for batch in batches:
        losses.append(float(batch.sum()))


def _keeps_views_of_one(batches: Watched) -> None:
    views, one = [], torch.rand(_NUMBERS)
    for _ in range(1):
        for _batch in batches:
            views.append(one[:2])


def _overwrites(batches: Watched) -> None:
    latest = {}
    for batch in batches:
        latest["batch"] = batch


class Cached(Dataset[Any]):
    """A dataset of which the doctor knows by a worker."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []


def _keeps_in_the_dataset(batches: Watched) -> None:
    dataset = Cached()
    for batch in batches:
        dataset.made.append(batch)


def _found(loop: Callable[[Watched], None], length: int = 100) -> tuple[MemoryGrowth | None, list[Finding]]:
    batches = Watched()
    loop(batches)
    measured = Measurements(
        name="x",
        machine=Machine(),
        settings=Settings(dataset="D", length=length),
        has_step=True,
        memory_growth=batches.found,
    )
    return batches.found, [one for one in diagnose(measured).findings if one.name == "kept-by-the-program"]


@pytest.mark.parametrize(
    ("loop", "name", "remedy"),
    [
        (_keeps_in_a_list, "history", "deque"),
        (_keeps_in_the_module, "_module_history", "deque"),
        (_keeps_beside_untouchable_objects, "pairs", "deque"),
        (_keeps_in_a_default_value, "the default values of _remember", "deque"),
        (_keeps_in_a_closure, "stored", "deque"),
        (_keeps_in_a_layer, "model.0.maps", "deque"),
        (_keeps_in_a_cache, "_cached", "maxsize"),
        (_keeps_losses, "norms", "detach"),
    ],
)
def test_a_variable_that_keeps_tensors_of_every_step_is_named(
    loop: Callable[[Watched], None], name: str, remedy: str
) -> None:
    growth, findings = _found(loop)
    list.clear(_module_history)
    for cache in (_cached,):  # under its own name it would be one that the program empties
        cache.cache_clear()
    assert growth is not None
    assert growth.name == name
    assert growth.step_nbytes > 3 * _NUMBERS
    (finding,) = findings
    assert name in finding.cause
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "loop", [_keeps_the_last_ones, _keeps_numbers, _keeps_views_of_one, _overwrites, _keeps_in_the_dataset]
)
def test_what_is_bounded_or_small_or_the_datasets_is_not_named(loop: Callable[[Watched], None]) -> None:
    assert _found(loop) == (None, [])


@pytest.mark.parametrize("loop", [_keeps_for_an_epoch, _keeps_in_a_function_of_one_epoch])
def test_what_begins_anew_with_each_epoch_is_named_where_an_epoch_keeps_much(loop: Callable[[Watched], None]) -> None:
    growth, findings = _found(loop, length=100)
    assert growth is not None
    assert growth.is_emptied
    assert not findings
    _, (finding,) = _found(loop, length=10_000)
    assert "in an epoch of 10000 batches" in finding.evidence
