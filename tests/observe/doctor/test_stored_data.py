"""What datasets keep: data that samples change, numbers of classes, tensors as keys; and what only looks like it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.contents.compare_loaders import Evaluation
from penstock.observe.doctor.contents.label_numbers import compare_label_numbers
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes.sample_calls import iter_sample_calls
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.stored.changed_data import find_changed_data
from penstock.observe.doctor.probes.stored.tensor_keys import find_tensor_keys
from penstock.observe.doctor.step_results import StepCalls
from penstock.observe.doctor.stored_results import ChangedData, LabelNumbers, TensorKeys
from penstock.observe.record.finding import Finding


class Rows(Dataset[Any]):
    """Rows whose samples are made by a function of the dataset and the index."""

    def __init__(self, make: Callable[[Any, int], Any], rows: Any = None, **more: Any) -> None:
        self.rows = torch.randn(64, 16) if rows is None else rows
        self.make = make
        self.__dict__.update(more)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.make(self, index)


def _changed(dataset: Any) -> ChangedData | None:
    calls = [call for call, _ in zip(iter_sample_calls(DataLoader(dataset, shuffle=True)), range(6), strict=False)]
    for _, make in calls:
        make()
    return find_changed_data(dataset, calls, time.perf_counter() + 20.0)


def _finding(name: str, settings: Settings | None = None, **found: Any) -> Finding | None:
    settings = settings or Settings(dataset="Rows")
    measured = Measurements(name="train.py", machine=Machine(), settings=settings, has_step=True, **found)
    return next((one for one in diagnose(measured).findings if one.name == name), None)


def _scaled(self: Any, index: int) -> Any:
    row = self.rows[index]
    row *= 0.8 + 0.4 * random.random()
    return row, index


def _scaled_and_flipped(self: Any, index: int) -> Any:
    row = self.rows[index]
    row *= np.float32(0.8 + 0.4 * np.random.rand())
    return torch.from_numpy(np.ascontiguousarray(row[::-1]))


def _noisy_list(self: Any, index: int) -> Any:
    row, label = self.rows[index]
    return row.add_(torch.randn(16)), label


def _masked(self: Any, index: int) -> Any:
    row = self.rows[index]
    row[torch.rand(256) < 0.3] = 0.0
    return row


def _noisy_cached(self: Any, index: int) -> Any:
    if index not in self.cache:
        self.cache[index] = torch.randn(16)
    return self.cache[index].add_(torch.randn(16))


CHANGING: dict[str, Callable[[], Any]] = {
    "a view of a tensor": lambda: Rows(_scaled),
    "an array whose sample is a flipped copy": lambda: Rows(_scaled_and_flipped, np.random.randn(64, 16).astype("f4")),
    "a list of tensors": lambda: Rows(_noisy_list, [(torch.randn(16), 1) for _ in range(64)]),
    "a cache that is filled once": lambda: Rows(_noisy_cached, cache={}),
    "below a Subset": lambda: Subset(Rows(_scaled), range(32)),
    "below a ConcatDataset": lambda: ConcatDataset([Rows(_scaled), Rows(_scaled)]),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_data_that_each_sample_changes_again_are_named(kind: str) -> None:
    found = _changed(CHANGING[kind]())
    assert found is not None
    assert found.attribute in ("Rows.rows", "Rows.cache")
    assert found.is_returned
    finding = _finding("changed-in-place", changed_data=found)
    assert finding is not None
    assert not finding.is_uncertain
    assert ".clone()" in finding.remedy


def test_the_probe_of_samples_looks_for_both() -> None:
    sampler = [*torch.randperm(64)]
    probe = SampleProbe(DataLoader(Rows(_scaled), batch_size=4, sampler=sampler), 0.5)
    probe.run()
    assert probe.error == ""
    assert probe.changed_data is not None
    probe = SampleProbe(DataLoader(Cached(lambda index: index), batch_size=4, sampler=torch.arange(8)), 0.5)  # type: ignore[arg-type]
    probe.run()
    assert probe.tensor_keys is not None
    assert probe.changed_data is None


def test_the_data_and_the_random_states_are_left_as_they_were() -> None:
    dataset = Rows(_scaled)
    calls = list(iter_sample_calls(DataLoader(dataset)))[:6]
    rows, states = dataset.rows.clone(), (torch.get_rng_state(), random.getstate())
    assert find_changed_data(dataset, calls, time.perf_counter() + 20.0) is not None
    assert torch.equal(rows, dataset.rows)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def _lazily(self: Any, index: int) -> Any:
    if not self.is_known[index]:
        self.kept[index] = self.rows[index] * 2
        self.is_known[index] = True
    return self.kept[index]


def _normalised_once(self: Any, index: int) -> Any:
    if not self.is_known[index]:
        self.rows[index] /= 10
        self.is_known[index] = True
    return self.rows[index] + torch.randn(16)


def _counted(self: Any, index: int) -> Any:
    self.made[index] += 1
    return self.rows[index], self.made[index]


def _running_mean(self: Any, index: int) -> Any:
    self.mean += 0.01 * (self.rows[index] - self.mean)
    return self.rows[index] + 0.1 * torch.randn(16)


def _buffered(self: Any, index: int) -> Any:
    torch.mul(self.rows[index], torch.rand(1), out=self.buffer)
    return self.buffer


def _a_buffer_for_each(self: Any, index: int) -> Any:
    self.out[index] = self.rows[index] + torch.randn(16)
    return self.out[index]


def _own_generator(self: Any, index: int) -> Any:
    self.out[index] = self.rows[index] + torch.randn(16, generator=self.generator)
    return self.out[index]


def _shuffled_in_place(self: Any, index: int) -> Any:
    np.random.shuffle(self.rows[index])
    return self.rows[index]


def _clipped(self: Any, index: int) -> Any:
    return self.rows[index].clamp_(-1.0, 1.0)


def _moved(self: Any, index: int) -> Any:
    self.state += 0.1 * self.velocity
    return self.state.clone()


def _mixed_with_the_one_before(self: Any, index: int) -> Any:
    row = self.rows[index]
    mixed = torch.stack([row, 0.5 * (row + self.before)])
    self.before[:] = row
    return mixed


def _normalised_again(self: Any, index: int) -> Any:
    row = self.rows[index]
    row -= row.mean()
    row /= row.std()
    return row


def _known(**more: Any) -> dict[str, Any]:
    return {"is_known": [False] * 64, **more}


LEGITIMATE: dict[str, Callable[[], Any]] = {
    "a copy is changed": lambda: Rows(lambda self, index: self.rows[index].clone().mul_(torch.rand(1))),
    "a cache is filled": lambda: Rows(_lazily, **_known(kept=torch.zeros(64, 16))),
    "rows are normalised once, in place": lambda: Rows(_normalised_once, **_known()),
    "a counter is returned": lambda: Rows(_counted, made=torch.zeros(64)),
    "statistics run": lambda: Rows(_running_mean, mean=torch.zeros(16)),
    "a buffer is used again": lambda: Rows(_buffered, buffer=torch.zeros(16)),
    "each sample has its buffer": lambda: Rows(_a_buffer_for_each, out=torch.zeros(64, 16)),
    "random numbers of its own": lambda: Rows(_own_generator, out=torch.zeros(64, 16), generator=torch.Generator()),
    "rows are shuffled in place": lambda: Rows(_shuffled_in_place, np.random.randn(64, 16)),
    "rows are clipped in place": lambda: Rows(_clipped),
    "a simulation moves on": lambda: Rows(_moved, state=torch.randn(16), velocity=torch.randn(16)),
    "mixed with the sample before": lambda: Rows(_mixed_with_the_one_before, before=torch.zeros(16)),
    "normalised again, but for rounding": lambda: Rows(_normalised_again, torch.randn(64, 37)),
}


@pytest.mark.parametrize("kind", LEGITIMATE)
def test_other_changes_of_what_is_stored_are_no_finding(kind: str) -> None:
    assert _changed(LEGITIMATE[kind]()) is None


def test_a_cache_that_replaces_its_oldest_row_is_left_as_it_is() -> None:
    def cached(self: Any, index: int) -> Any:
        if index not in self.places:
            place = next(self.turns) % 4
            self.places = {one: other for one, other in self.places.items() if other != place} | {index: place}
            self.kept[place] = self.rows[index]
        return self.kept[self.places[index]]

    dataset: Any = Rows(cached, kept=torch.zeros(4, 16), places={}, turns=itertools.count())
    assert _changed(dataset) is None
    assert all(torch.equal(dataset.kept[place], dataset.rows[index]) for index, place in dataset.places.items())


def test_masks_that_pile_up_are_found() -> None:
    assert _changed(Rows(_masked, torch.randn(64, 256))) is not None


def test_a_memory_map_that_is_only_read_is_not_touched(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.random.randn(64, 16))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert _changed(Rows(lambda self, index: np.array(self.rows[index]) * np.random.rand(), rows)) is None


def test_workers_that_are_new_in_each_epoch_make_it_uncertain() -> None:
    found = ChangedData(attribute="Rows.rows", samples=3, tried=3, is_returned=True)
    for workers, persistent, is_uncertain in [(0, False, False), (2, True, False), (2, False, True)]:
        settings = Settings(dataset="Rows", num_workers=workers, persistent_workers=persistent)
        finding = _finding("changed-in-place", settings, changed_data=found)
        assert finding is not None
        assert finding.is_uncertain is is_uncertain
    average = ChangedData(attribute="Rows.ema_rows", samples=3, tried=3, is_returned=True)
    finding = _finding("changed-in-place", changed_data=average)
    assert finding is not None
    assert finding.is_uncertain


class Named(Dataset[Any]):
    """A dataset with attributes."""

    def __init__(self, size: int = 50, **attributes: Any) -> None:
        self.size = size
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Other(Named):
    """A dataset of another class."""


class Encoder:
    """As scikit-learn's LabelEncoder."""

    def __init__(self, names: Sequence[str]) -> None:
        self.classes_ = np.array(sorted(names))


def _numbered(text: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(text.split())}


def _labels(training: Any, evaluation: Any) -> LabelNumbers | None:
    return compare_label_numbers(DataLoader(training), [Evaluation(name="val_loader", loader=DataLoader(evaluation))])


_CLASSIFIES = StepCalls(steps=3, weight_rows=(4, 8, 128))


def test_classes_with_other_numbers_in_an_evaluation_are_named() -> None:
    found = _labels(Named(class_to_idx=_numbered("a b c d")), Subset(Named(class_to_idx=_numbered("a c d")), [0, 1]))
    finding = _finding("labels-differ", label_numbers=found, step_calls=_CLASSIFIES)
    assert finding is not None
    assert not finding.is_uncertain
    for calls in (None, StepCalls(steps=3, weight_rows=(128,))):  # of prototypes numbers are only compared
        finding = _finding("labels-differ", label_numbers=found, step_calls=calls)
        assert finding is not None
        assert finding.is_uncertain
    assert "'c' is 2 and 1, 'd' is 3 and 2" in finding.evidence
    assert _labels(Named(encoder=Encoder("abcd")), Named(encoder=Encoder("acd"))) is not None


def test_what_may_be_meant_so_is_uncertain() -> None:
    four, three = _numbered("a b c d"), _numbered("a c d")
    for training, evaluation in [
        (Named(stations=four), Named(stations=three)),
        (Named(classes=list(four)), Named(classes=list(three))),
        (Named(class_to_idx=four), Other(class_to_idx=three)),
        (Named(class_to_idx=four), Named(class_to_idx=three, target_transform=lambda label: label + 1)),
        (Named(class_to_idx=four), Named(class_to_idx=_numbered("u v w x y d"))),
        (Named(class_to_idx=_numbered("a b c d e f g h")), Named(class_to_idx=three)),  # it may pick their outputs
    ]:
        finding = _finding("labels-differ", label_numbers=_labels(training, evaluation), step_calls=_CLASSIFIES)
        assert finding is not None
        assert finding.is_uncertain


def test_other_names_the_same_numbers_and_rows_are_no_finding() -> None:
    four = _numbered("a b c d")
    assert _labels(Named(class_to_idx=four), Named(class_to_idx=four)) is None
    assert _labels(Named(class_to_idx=four), Named(class_to_idx=_numbered("a b"))) is None
    assert _labels(Named(class_to_idx=four), Named(class_to_idx=_numbered("e f g"))) is None  # open-set
    assert _labels(Named(4, index=four), Named(3, index=_numbered("a c d"))) is None  # its own rows
    assert _labels(Named(class_counts={"a": 1, "b": 0}), Named(class_counts={"a": 0, "b": 1})) is None
    assert _labels(Named(first={"a": 0, "b": 700}), Named(first={"a": 0, "b": 90})) is None
    assert _labels(Named(ids=["a", "b"]), Named(ids=["b", "a"])) is None
    shown = Named(class_to_idx=four, classes=["a", "c", "d"])
    assert _labels(Named(class_to_idx=four, classes=list(four)), shown) is None


class Cached(Dataset[Any]):
    """A dataset that keeps what it has made."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self.known: dict[Any, Any] = {}
        self.key = key

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        return self.known.setdefault(self.key(index), int(index))  # type: ignore[no-any-return]


def _keys(dataset: Any, indices: Any = None) -> TensorKeys | None:
    """Return what is found after two epochs of a sampler's."""
    loader = DataLoader(dataset, sampler=torch.arange(8) if indices is None else indices)  # type: ignore[arg-type]
    for _, make in [*iter_sample_calls(loader), *iter_sample_calls(loader)]:
        make()
    return find_tensor_keys(dataset, iter_sample_calls(loader))


def test_a_cache_by_the_tensors_of_a_sampler_is_named() -> None:
    dataset = Cached(lambda index: index)
    found = _keys(dataset)
    assert found is not None
    assert (found.attribute, found.keys, found.numbers) == ("Cached.known", 16, 8)
    finding = _finding("tensors-as-keys", tensor_keys=found)
    assert finding is not None
    assert not finding.is_uncertain


@pytest.mark.parametrize("key", [int, lambda index: index.item(), lambda index: np.int64(index)])
def test_a_cache_by_numbers_is_no_finding(key: Callable[[Any], Any]) -> None:
    assert _keys(Cached(key)) is None


def test_tensors_that_are_meant_as_themselves_may_be_keys() -> None:
    dataset = Cached(int)
    dataset.known = dict.fromkeys(torch.nn.Linear(2, 2).parameters(), 0.1)
    assert _keys(dataset) is None
    dataset.known = {torch.tensor(0): "a", torch.tensor(1): "b"}  # which are looked through
    assert _keys(dataset) is None


def test_a_sampler_that_yields_the_same_tensors_in_each_epoch_finds_what_was_kept() -> None:
    assert _keys(Cached(lambda index: index), [*torch.arange(8)]) is None
