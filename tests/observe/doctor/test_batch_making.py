"""Batches that are made of many cheap samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.data import DataLoader, Dataset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import SampleCosts
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial
from penstock.observe.doctor.trials.trial_plan import read_settings


def _windows(name: str, batch_s: float, wait_s: float) -> Trial:
    window = TimingWindow(batches=10, wall_s=10 * batch_s, wait_s=10 * wait_s, step_s=10 * (batch_s - wait_s))
    return Trial(name=name, windows=(window,) * 4)


def _rows() -> Measurements:
    """A loop with 4096 samples of 6 µs in a batch."""
    samples = SampleCosts(samples=9000, batch_samples=4096, sample_s=6e-6, median_s=6e-6, collate_s=0.01)
    return Measurements(
        name="train",
        machine=Machine(cores=2),
        settings=Settings(dataset="Clicks", batch_size=4096),
        has_step=True,
        trials=(_windows(AS_IS, 0.040, 0.035), _windows(FREE, 0.005, 0.0)),
        samples=samples,
    )


def _names(found: Measurements) -> list[str]:
    return [finding.name for finding in diagnose(found).findings]


def test_large_batches_of_cheap_samples_are_to_be_made_at_once() -> None:
    (finding,) = (one for one in diagnose(_rows()).findings if one.name == "made-one-by-one")
    assert "4096 samples of 6.0 µs" in finding.evidence
    assert "BatchSampler" in finding.remedy
    assert finding.gain == pytest.approx(8.0)
    stream = replace(_rows(), settings=replace(_rows().settings, is_iterable=True))
    (finding,) = (one for one in diagnose(stream).findings if one.name == "made-one-by-one")
    assert "yield batches" in finding.remedy


def test_batches_that_are_small_or_dear_or_fetched_in_bulk_are_not() -> None:
    found = _rows()
    assert found.samples is not None
    assert "made-one-by-one" not in _names(
        replace(found, samples=replace(found.samples, batch_samples=128, collate_s=1e-4))
    )
    assert "made-one-by-one" not in _names(replace(found, samples=replace(found.samples, sample_s=2e-4)))
    assert "made-one-by-one" not in _names(replace(found, settings=replace(found.settings, fetches_in_bulk=True)))
    hidden = (_windows(AS_IS, 0.040, 0.001), _windows(FREE, 0.039, 0.0))
    assert "made-one-by-one" not in _names(replace(found, trials=hidden))


class Bulk(Dataset[int]):
    """Gives the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def test_a_dataset_that_is_asked_for_whole_batches_is_known() -> None:
    assert read_settings(DataLoader(Bulk(), batch_size=2, sampler=range(4))).fetches_in_bulk
    assert not read_settings(DataLoader(range(4), batch_size=2)).fetches_in_bulk
