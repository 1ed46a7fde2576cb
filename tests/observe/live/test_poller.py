"""A snapshot of a run counts every loader once, also those that are gone; its rates are those of the last seconds."""

from __future__ import annotations

import gc

import pytest
import torch

from penstock import DataLoader
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.live.poller import RunPoller
from penstock.observe.meters.host_memory import MemoryMeter


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


def test_without_an_accelerator_in_use_none_is_initialized() -> None:
    now = RunPoller(LoaderRegistry(), MemoryMeter()).poll().now
    assert (now.device_nbytes, now.device_reserved_nbytes, now.device_utilization) == (None, None, None)
    assert not torch.cuda.is_initialized()
