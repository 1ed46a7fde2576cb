"""A snapshot of a run counts every loader once, also those that are gone; its rates are those of the last seconds."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch.utils.data import DistributedSampler

from penstock import DataLoader
from penstock.core.stats import LoaderStatistics
from penstock.loader.dataloader import observers
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.live_text import progress_line
from penstock.observe.live.loader_registry import LoaderRegistry, RegisteredLoader
from penstock.observe.live.poller import RunPoller, with_position
from penstock.observe.meters.host_memory import MemoryMeter
from penstock.observe.record.group_loaders import settings_text
from penstock.observe.record.run_record import label_of
from penstock.observe.record.timeline import TimelinePoint


def test_loaders_that_are_gone_stay_counted_and_are_not_polled() -> None:
    registry = LoaderRegistry()
    poller = RunPoller(registry, MemoryMeter())
    for _ in range(5):
        loader = DataLoader(torch.arange(12.0), batch_size=4)
        registry.register(loader)
        list(loader)
        del loader
        gc.collect()
        poller.poll()
    kept = DataLoader(torch.arange(8.0), batch_size=4)
    registry.register(kept)
    iterator = iter(kept)
    next(iterator)
    snapshot = poller.poll()
    assert (snapshot.now.batches, snapshot.now.samples) == (16, 64)
    assert snapshot.now.loading_s == pytest.approx(
        snapshot.now.stages.fetch_s + snapshot.now.stages.collate_s + snapshot.now.stages.transport_s, rel=0.5
    )
    assert len(poller._open) == 1
    assert poller.poll().now.batches == 16


def test_a_loader_is_recorded_with_the_class_of_a_sampler_that_shuffles() -> None:
    data = torch.arange(12.0)
    ranks = DistributedSampler(data, num_replicas=2, rank=0)
    in_order = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    shuffled = [{"shuffle": True}, {"sampler": ranks}, {"sampler": in_order}, {}]
    found = [RegisteredLoader(DataLoader(data, **options)).record().shuffled_by for options in shuffled]
    assert found == ["RandomSampler", "DistributedSampler", "", ""]


def test_the_position_is_that_of_the_last_batch_handed_out() -> None:
    registry = LoaderRegistry()
    poller = RunPoller(registry, MemoryMeter(), rank=(1, 4))
    loader = DataLoader(torch.arange(12.0), batch_size=4)
    registry.register(loader)
    seen = []
    for _ in range(2):
        for _ in loader:
            snapshot = poller.poll()
            seen.append((snapshot.epoch, snapshot.batch, snapshot.length))
        snapshot = poller.poll()
        assert (snapshot.batch, snapshot.length) == (3, 3)
    assert seen == [(1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 1, 3), (2, 2, 3), (2, 3, 3)]
    assert (snapshot.rank, snapshot.world_size) == (1, 4)
    assert snapshot.samples_per_s > 0
    assert snapshot.eta_s == 0


def test_an_epoch_that_is_not_meant_to_end_has_no_remaining_time() -> None:
    now = LiveSnapshot(pid=1, now=TimelinePoint(at_s=9), loader="Tensor", batches_per_s=4.3)
    endless = with_position(now, LoaderStatistics(batches=50, length=10_000_000_000))
    assert (endless.batch, endless.eta_s) == (50, None)
    assert "left" not in progress_line(endless)
    long = with_position(now, LoaderStatistics(batches=50, length=1_000_000))
    assert long.eta_s == pytest.approx(999_950 / 4.3)


def test_loaders_that_are_not_iterated_take_no_number_and_names_say_where_loaders_were_made() -> None:
    registry = LoaderRegistry()
    loaders = [DataLoader(torch.arange(4.0)) for _ in range(3)]
    for loader in loaders:
        registry.register(loader)
    assert registry.iterated() == []
    list(loaders[2])
    list(loaders[0])
    first, third = (one.label for one in registry.iterated())
    assert third.startswith("Tensor (test_poller.py:")
    assert first.startswith("Tensor #2 (test_poller.py:")
    snapshot = RunPoller(registry, MemoryMeter()).poll()
    assert label_of(snapshot.loader, snapshot.made_at) in (first, third)
    assert [one.is_iterated for one in registry.records()] == [True, False, True]


class Made(DataLoader[int]):
    """Its constructor is not where it is made."""

    def __init__(self) -> None:
        super().__init__(torch.arange(4.0))


def test_a_subclass_is_made_where_its_constructor_is_called() -> None:
    registry = LoaderRegistry()
    observers.append(registry.register)
    try:
        line, _ = sys._getframe().f_lineno, Made()
    finally:
        observers.remove(registry.register)
    assert registry.records()[0].made_at == f"test_poller.py:{line}"


def test_without_an_accelerator_in_use_none_is_initialized() -> None:
    now = RunPoller(LoaderRegistry(), MemoryMeter()).poll().now
    assert (now.device_nbytes, now.device_reserved_nbytes, now.device_utilization) == (None, None, None)
    assert not torch.cuda.is_initialized()


def test_a_number_of_workers_that_was_left_to_the_loader_is_recorded_as_it_was_asked_for() -> None:
    registry = LoaderRegistry()
    registry.register(DataLoader(torch.arange(4), num_workers="auto"))
    registry.register(DataLoader(torch.arange(4), num_workers=1))
    asked, other = registry.records()
    assert (asked.settings["num_workers"], other.settings["num_workers"]) == ("auto", 1)
    assert "num_workers='auto'" in settings_text(asked)
