"""Batches that are made of many cheap samples, and those that are padded beyond their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.contents.batch_padding import find_padding
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import Padding, SampleCosts
from penstock.observe.doctor.probes.sample_cost import tensor_nbytes
from penstock.observe.doctor.step_results import StepCalls
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial
from penstock.observe.doctor.trials.trial_plan import read_settings

Padder = Callable[[list[torch.Tensor]], torch.Tensor]


def _windows(name: str, batch_s: float, wait_s: float) -> Trial:
    window = TimingWindow(batches=10, wall_s=10 * batch_s, wait_s=10 * wait_s, step_s=10 * (batch_s - wait_s))
    return Trial(name=name, windows=(window,) * 4)


def _rows() -> Measurements:
    """A loop with 4096 samples of 6 µs in a batch."""
    samples = SampleCosts(
        samples=9000, batch_samples=4096, sample_s=6e-6, median_s=6e-6, transform_fraction=1.0, collate_s=0.01
    )
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
    assert "made-one-by-one" not in _names(replace(found, samples=replace(found.samples, median_s=2e-4)))
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


def _texts(*lengths: int) -> list[tuple[torch.Tensor, int]]:
    return [(torch.arange(1, length + 1), length) for length in lengths]


def _pad(width: int) -> Padder:
    def pad(texts: list[torch.Tensor]) -> torch.Tensor:
        made = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in zip(made, texts, strict=True):
            row[: len(text)] = text
        return made

    return pad


@pytest.mark.parametrize(
    ("width", "expected"),
    [(100, Padding(shape=(3, 100), longest=30, padded=100)), (30, None), (40, None)],
    ids=["to a fixed size", "to the longest", "to a multiple of it"],
)
def test_sequences_that_are_padded_far_beyond_the_longest_are_known(width: int, expected: Padding | None) -> None:
    samples = _texts(3, 30, 12)
    batch = {"text": _pad(width)([text for text, _ in samples]), "length": torch.tensor([3, 30, 12])}
    assert find_padding(samples, batch) == expected
    assert find_padding([(text.tolist(), length) for text, length in samples], batch) == expected


def test_images_that_are_padded_in_one_direction_are_known_and_classes_are_no_padding() -> None:
    samples = [(np.full((32, width), 7, np.uint8), width) for width in (60, 144)]
    canvas = torch.full((2, 1, 32, 768), 235, dtype=torch.uint8)
    for row, (image, width) in zip(canvas, samples, strict=True):
        row[0, :, :width] = torch.from_numpy(image)
    assert find_padding(samples, canvas) == Padding(shape=(2, 1, 32, 768), longest=144, padded=768)
    texts = _texts(3, 12)
    classes = torch.nn.functional.one_hot(torch.tensor([90, 40]), 100)
    assert find_padding(texts, classes) is None
    assert find_padding([(np.zeros((3, 4)), 0)] * 2, torch.zeros(2, 100)) is None, "all of one size"
    assert find_padding([(torch.ones(2), 0), (torch.ones(2), torch.ones(3))], torch.zeros(2, 100)) is None, "uneven"


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|quantize)")
def test_tensors_without_sizes_or_values_are_no_padding_and_no_error() -> None:
    samples = _texts(3, 30)
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(30)])
    for batch in (torch.eye(2, 100).to_sparse(), torch.eye(2, 100).to_sparse_csr(), nested):
        assert find_padding(samples, batch) is None
    assert find_padding(samples, torch.empty(2, 100, device="meta")) is None
    assert tensor_nbytes([torch.eye(2, 100).to_sparse(), torch.zeros(4)]) == 16
    assert find_padding([(nested, 0)] * 2, torch.zeros(2, 100)) is None


def test_padding_of_a_batch_is_a_finding_beside_its_steps() -> None:
    found = _rows()
    assert found.samples is not None
    seen: Any = StepCalls(steps=4)
    padding = Padding(shape=(16, 80), longest=20, padded=80)
    changed = replace(found, step_calls=seen, samples=replace(found.samples, padding=padding))
    assert "padded-too-far" in _names(changed)
    assert "padded-too-far" not in _names(replace(found, step_calls=seen))
