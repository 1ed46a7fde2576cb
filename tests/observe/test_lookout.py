"""A look at a run counts every loader once, also those that are gone, and its rates are those of the last seconds."""

from __future__ import annotations

import gc

import pytest
import torch

from penstock import DataLoader
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.lookout import Lookout
from penstock.observe.watch import Watch


def test_loaders_that_are_gone_stay_counted_and_are_looked_at_no_more() -> None:
    watch = Watch()
    lookout = Lookout(watch, MemoryMeter())
    for _ in range(5):
        loader = DataLoader(torch.arange(12.0), batch_size=4)
        watch.notice(loader)
        list(loader)
        del loader
        gc.collect()
        lookout.look()
    kept = DataLoader(torch.arange(8.0), batch_size=4)
    watch.notice(kept)
    iterator = iter(kept)
    next(iterator)
    pulse = lookout.look()
    assert (pulse.moment.batches, pulse.moment.samples) == (16, 64)
    assert pulse.moment.loading_s == pytest.approx(
        pulse.moment.stages.fetch_s + pulse.moment.stages.collate_s + pulse.moment.stages.transport_s, rel=0.5
    )
    assert len(lookout._open) == 1
    assert lookout.look().moment.batches == 16


def test_the_place_is_that_of_the_batch_that_was_handed_out_last() -> None:
    watch = Watch()
    lookout = Lookout(watch, MemoryMeter(), rank=(1, 4))
    loader = DataLoader(torch.arange(12.0), batch_size=4)
    watch.notice(loader)
    seen = []
    for _ in range(2):
        for _ in loader:
            pulse = lookout.look()
            seen.append((pulse.epoch, pulse.batch, pulse.length))
        pulse = lookout.look()
        assert (pulse.batch, pulse.length) == (3, 3)
    assert seen == [(1, 1, 3), (1, 2, 3), (1, 3, 3), (2, 1, 3), (2, 2, 3), (2, 3, 3)]
    assert (pulse.rank, pulse.world_size) == (1, 4)
    assert pulse.samples_per_s > 0
    assert pulse.eta_s == 0


def test_without_an_accelerator_in_use_none_is_begun() -> None:
    moment = Lookout(Watch(), MemoryMeter()).look().moment
    assert (moment.device_nbytes, moment.device_reserved_nbytes, moment.device_busy) == (None, None, None)
    assert not torch.cuda.is_initialized()
