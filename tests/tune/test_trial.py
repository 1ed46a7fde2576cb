"""Trials reuse workers, see the loop's own batches, and leave nothing behind."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from sample_sets import Arrays, Augmented, Numbered, Stream
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock import OptionError
from penstock.tune.setting import Setting
from penstock.tune.subject import Subject, apart, subject_of
from penstock.tune.trial import Stand

pytestmark = pytest.mark.alone


def process(workers: int, prefetch: int = 2) -> Setting:
    return Setting(workers=workers, body="process", prefetch_factor=prefetch)


SETTINGS = [Setting(), process(1), process(2), Setting(workers=2, body="thread")]


@pytest.mark.parametrize("setting", SETTINGS, ids=Setting.words)
def test_a_trial_is_of_the_loaders_own_batches_over_and_over(setting) -> None:
    subject = Subject(loader=DataLoader(Numbered(20), batch_size=8))
    loader = subject.build(setting, most=4)
    batches = iter(loader)
    assert [labels.tolist() for _, labels in islice(batches, 6)] == 2 * [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 20)],
    ]
    del batches


def test_workers_stay_while_only_their_number_or_the_prefetch_changes() -> None:
    seen: list[int] = []
    subject = Subject(loader=DataLoader(Numbered(500), batch_size=8), step=lambda batch: seen.extend(batch[1].tolist()))
    with Stand(subject, most=4) as stand:
        stand.measure(process(2), at_least_s=0.02)
        run = stand._open["process", False, None, None]
        before = {worker.pid for worker in run._batches._workers}
        for setting in (process(2, 4), process(3), process(1)):
            trial = stand.measure(setting, at_least_s=0.02)
            assert trial.setting == setting
            assert run is stand._open["process", False, None, None]
        assert {worker.pid for worker in run._batches._workers} < before
    assert seen == [number % 500 for number in range(len(seen))]


def test_where_samples_can_tell_their_worker_another_number_means_other_workers() -> None:
    subject = Subject(loader=DataLoader(Augmented(64), batch_size=8))
    with Stand(subject, most=4) as stand:
        assert stand.measure(process(2), at_least_s=0.02).mode == "round_robin"
        first = stand._open["process", False, None, None]
        stand.measure(process(3), at_least_s=0.02)
        assert stand._open["process", False, None, None] is not first


def test_a_trial_counts_what_the_loop_did() -> None:
    subject = Subject(loader=DataLoader(Numbered(500, delay_s=0.001), batch_size=8), step_s=0.002)
    with Stand(subject, most=4) as stand:
        trial = stand.measure(Setting(), at_least_s=0.1)
        assert trial.batches >= 8
        assert trial.step_s >= 0.002
        assert trial.work_s >= 0.008
        assert 0.5 < trial.stall_share < 1
        assert trial.batch_ms[0] <= trial.batch_ms[1] <= trial.batch_ms[2]
        assert trial.batch_nbytes == 8 * 3 * 40 * 40 * 4
        more = stand.measure(Setting(), at_least_s=0.05)
        assert more.batches > trial.batches


def test_an_iterable_dataset_is_read_epoch_after_epoch() -> None:
    with Stand(Subject(loader=DataLoader(Stream(40), batch_size=8)), most=4) as stand:
        for setting in (Setting(), process(1), process(2)):
            assert stand.measure(setting, at_least_s=0.05).batches >= 8


def test_a_loader_without_batches_is_an_error() -> None:
    for dataset in (Numbered(0), Stream(0)):
        subject = Subject(loader=DataLoader(dataset, batch_size=8))
        with Stand(subject, most=2) as stand, pytest.raises(OptionError, match="has no batches"):
            stand.measure(Setting(), at_least_s=0.01)


def test_the_workers_dataset_is_not_the_one_that_the_training_process_opened() -> None:
    class Opening(Numbered):
        opened = False

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            self.opened = True
            return super().__getitem__(index)

    Opening.__qualname__ = "Opening"
    globals()["Opening"] = Opening  # so that it can be pickled
    subject = Subject(loader=DataLoader(Opening(40), batch_size=8))
    with Stand(subject, most=2) as stand:
        stand.measure(Setting(), at_least_s=0.01)
        stand.measure(Setting(workers=1, body="thread"), at_least_s=0.01)
    assert not subject.loader.dataset.opened


def test_a_dataset_set_apart_shares_its_arrays() -> None:
    dataset = Arrays()
    assert apart(dataset) is not dataset
    assert apart(dataset).images.data_ptr() == dataset.images.data_ptr()
    unpicklable = TensorDataset(torch.zeros(3))
    unpicklable.read = lambda: None
    assert apart(unpicklable) is unpicklable


def test_a_subject_is_a_loader_a_function_or_a_pair() -> None:
    loader = DataLoader(Numbered(8))
    assert subject_of(loader).loader is loader
    assert subject_of(lambda: loader).loader is loader
    assert subject_of((loader, print)).step is print
    assert subject_of(lambda: (loader, print)).step is print
    assert subject_of((loader, print), step=len).step is len
    with pytest.raises(OptionError, match=r"a DataLoader is needed.*this is int"):
        subject_of(3)
    with pytest.raises(OptionError, match="a step is a function"):
        subject_of(loader, step=3)


def test_penstocks_own_arguments_are_kept() -> None:
    loader = penstock.DataLoader(Numbered(8), errors="skip", dispatch="round_robin", max_deaths=7)
    built = Subject(loader=loader).build(process(2), most=2)
    assert (built._errors, built._dispatch_option, built._max_deaths) == ("skip", "round_robin", 7)
