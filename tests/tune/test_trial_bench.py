"""Trials reuse workers, use the loop's own batches, and leave nothing behind."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from sample_sets import Arrays, Augmented, Numbered, Stream
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock import OptionError
from penstock.core.stats import LoaderStatistics, StageTimes
from penstock.loader.dataloader import config_of
from penstock.tune.setting import Setting
from penstock.tune.trial_bench import TrialBench
from penstock.tune.trial_result import TrialTotals
from penstock.tune.tuned_loop import TunedLoop, copy_sharing_arrays, resolve_tuned_loop

pytestmark = pytest.mark.slow


def process(workers: int, prefetch: int = 2) -> Setting:
    return Setting(workers=workers, worker_type="process", prefetch_factor=prefetch)


SETTINGS = [Setting(), process(1), process(2), Setting(workers=2, worker_type="thread")]


@pytest.mark.parametrize("setting", SETTINGS, ids=Setting.describe)
def test_a_trial_is_of_the_loaders_own_batches_over_and_over(setting) -> None:
    loop = TunedLoop(loader=DataLoader(Numbered(20), batch_size=8))
    loader = loop.build(setting, most=4)
    batches = iter(loader)
    assert [labels.tolist() for _, labels in islice(batches, 6)] == 2 * [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 20)],
    ]
    del batches


def test_workers_stay_while_only_their_number_or_the_prefetch_changes() -> None:
    seen: list[int] = []
    loader = penstock.DataLoader(Numbered(500), batch_size=8, dispatch="demand")
    loop = TunedLoop(loader=loader, step=lambda batch: seen.extend(batch[1].tolist()))
    with TrialBench(loop, most=4) as bench:
        bench.measure(process(2), at_least_s=0.02)
        run = bench._open["process", False, None]
        before = {worker.pid for worker in run._batches._workers}
        for setting in (process(2, 4), process(3), process(1)):
            trial = bench.measure(setting, at_least_s=0.02)
            assert trial.setting == setting
            assert run is bench._open["process", False, None]
        assert {worker.pid for worker in run._batches._workers} < before
    assert seen == [number % 500 for number in range(len(seen))]


def test_if_samples_depend_on_their_worker_another_number_means_other_workers() -> None:
    loop = TunedLoop(loader=DataLoader(Augmented(64), batch_size=8))
    with TrialBench(loop, most=4) as bench:
        bench.measure(process(2), at_least_s=0.02)
        first = bench._open["process", False, None]
        bench.measure(process(3), at_least_s=0.02)
        assert bench._open["process", False, None] is not first


def test_a_trial_counts_what_the_loop_did() -> None:
    loop = TunedLoop(loader=DataLoader(Numbered(500, delay_s=0.001), batch_size=8), step_s=0.002)
    with TrialBench(loop, most=4) as bench:
        trial = bench.measure(Setting(), at_least_s=0.1)
        assert trial.batches >= 8
        assert trial.step_s >= 0.002
        assert trial.work_s >= 0.008
        assert 0 < trial.stall_fraction < 1
        assert trial.batch_ms[0] <= trial.batch_ms[1] <= trial.batch_ms[2]
        assert trial.batch_nbytes == 8 * (3 * 40 * 40 * 4 + 8)  # images, and labels
        more = bench.measure(Setting(), at_least_s=0.05)
        assert more.batches > trial.batches


def test_batches_that_come_all_at_once_are_averaged_over_rounds() -> None:
    totals = TrialTotals()
    totals.add_periods([0.8, *[0.0] * 15] * 6, workers=16)
    assert totals.blocks_s == pytest.approx([0.05] * 6)


def test_worker_processes_cost_their_start_once_an_epoch_and_threads_and_those_that_persist_nothing() -> None:
    totals = TrialTotals()
    totals.add_periods([0.01] * 10)
    totals.seen.append(LoaderStatistics(batches=10, samples=80))
    threads = Setting(workers=2, worker_type="thread")

    def speeds(loader: DataLoader) -> list[float]:
        with TrialBench(TunedLoop(loader=loader), most=2) as bench:
            bench._totals, bench._starts_s = {process(2): totals, threads: totals}, [0.03, 0.01]
            return [bench.trial(setting).samples_per_s for setting in (process(2), threads)]

    # Two starts of 20 ms for an epoch of 4 batches.
    assert speeds(DataLoader(Numbered(32), batch_size=8)) == pytest.approx([400, 800])
    persistent = DataLoader(Numbered(32), batch_size=8, num_workers=1, persistent_workers=True)
    assert speeds(persistent) == pytest.approx([800, 800])
    assert speeds(DataLoader(Stream(32), batch_size=8)) == pytest.approx([800, 800])


def test_a_worker_that_waits_for_a_core_computes() -> None:
    stages = StageTimes(fetch_s=10.0)
    for queued_s, busy in ((0.0, 0.25), (5.0, 0.5), (7.5, 1.0)):
        totals = TrialTotals(cpu_s=2.5, without_core_s=queued_s)
        totals.add_periods([1.0] * 10)
        totals.seen.append(LoaderStatistics(batches=10, samples=10, stages=stages))
        assert totals.result(process(1)).busy_fraction == pytest.approx(busy)


def test_an_iterable_dataset_is_read_epoch_after_epoch() -> None:
    with TrialBench(TunedLoop(loader=DataLoader(Stream(40), batch_size=8)), most=4) as bench:
        for setting in (Setting(), process(1), process(2)):
            assert bench.measure(setting, at_least_s=0.05).batches >= 8


def test_a_loader_without_batches_is_an_error() -> None:
    for dataset in (Numbered(0), Stream(0)):
        loop = TunedLoop(loader=DataLoader(dataset, batch_size=8))
        with TrialBench(loop, most=2) as bench, pytest.raises(OptionError, match="has no batches"):
            bench.measure(Setting(), at_least_s=0.01)


def test_the_workers_dataset_is_not_the_one_that_the_training_process_opened() -> None:
    class Opening(Numbered):
        opened = False

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            self.opened = True
            return super().__getitem__(index)

    Opening.__qualname__ = "Opening"
    globals()["Opening"] = Opening  # so that it can be pickled
    loop = TunedLoop(loader=DataLoader(Opening(40), batch_size=8))
    with TrialBench(loop, most=2) as bench:
        bench.measure(Setting(), at_least_s=0.01)
        bench.measure(Setting(workers=1, worker_type="thread"), at_least_s=0.01)
    assert not loop.loader.dataset.opened


def test_a_copy_of_a_dataset_shares_its_arrays() -> None:
    dataset = Arrays()
    assert copy_sharing_arrays(dataset) is not dataset
    assert copy_sharing_arrays(dataset).images.data_ptr() == dataset.images.data_ptr()
    unpicklable = TensorDataset(torch.zeros(3))
    unpicklable.read = lambda: None
    assert copy_sharing_arrays(unpicklable) is unpicklable


def test_a_tuned_loop_is_a_loader_a_function_or_a_pair() -> None:
    loader = DataLoader(Numbered(8))
    assert resolve_tuned_loop(loader).loader is loader
    assert resolve_tuned_loop(lambda: loader).loader is loader
    assert resolve_tuned_loop((loader, print)).step is print
    assert resolve_tuned_loop(lambda: (loader, print)).step is print
    assert resolve_tuned_loop((loader, print), step=len).step is len
    with pytest.raises(OptionError, match=r"a DataLoader is needed.*this is int"):
        resolve_tuned_loop(3)
    with pytest.raises(OptionError, match="a step has to be a function"):
        resolve_tuned_loop(loader, step=3)


def test_penstocks_own_arguments_are_kept() -> None:
    loader = penstock.DataLoader(Numbered(8), errors="skip", dispatch="round_robin", max_worker_crashes=7)
    built = TunedLoop(loader=loader).build(process(2), most=2)
    config = config_of(built)
    assert (config.errors, config.dispatch, config.max_worker_crashes) == ("skip", "round_robin", 7)
