"""Samples that a loop has twice, or trains on and evaluates, and fields of several types: what is said of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.contents.compare_loaders import Evaluation, compare_loaders, listed_twice
from penstock.observe.doctor.contents.origins import origins_of
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes import worker_noise
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.rendering import render
from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.evaluation_loaders import EvaluationLoaders
from penstock.observe.record.finding import Finding


class Rows(Dataset[Any]):
    """Rows of random numbers, the same for the same seed, with a transform as usual datasets have one."""

    def __init__(self, size: int = 100, transform: Any = None, seed: int = 0) -> None:
        self.rows = np.random.default_rng(seed).standard_normal((size, 128)).astype(np.float32)
        self.transform = transform
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        row = self.rows[index]
        return (self.transform(row) if self.transform is not None else row), index % 3


def _noisy(row: np.ndarray) -> np.ndarray:
    return row + np.random.standard_normal(row.shape).astype(np.float32)


def _shuffled(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, shuffle=not options, **options)


def _compared(training: DataLoader[Any], *others: DataLoader[Any]) -> dict[str, Any]:
    evaluations = [Evaluation(name=f"val_loader{number or ''}", loader=one) for number, one in enumerate(others)]
    return {"shared_samples": compare_loaders(training, evaluations), "listed_twice": listed_twice(training)}


def _measured(**more: Any) -> Measurements:
    return Measurements(
        name="train.py",
        machine=Machine(),
        settings=Settings(dataset="Rows"),
        has_step=True,
        **more,
    )


def _findings(measured: Measurements) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(measured).findings}


def _of(training: DataLoader[Any], *others: DataLoader[Any]) -> dict[str, Finding]:
    return _findings(_measured(**_compared(training, *others)))


# ── in train and validation ─────────────────────────────────────────────────────────────────────────────────


def test_folds_that_overlap_by_one_are_found_with_the_index() -> None:
    rows = Rows()
    finding = _of(_shuffled(Subset(rows, range(81))), DataLoader(Subset(rows, range(80, 100))))[
        "in-train-and-validation"
    ]
    assert not finding.is_uncertain
    assert "1 of the 20 samples of val_loader" in finding.evidence
    assert "Rows[80]" in finding.evidence
    assert rows.read.count(80) <= 1  # indices tell: the validation is not read for it


def test_sets_that_share_no_index_and_no_content_are_not_mentioned() -> None:
    rows = Rows()
    assert _of(_shuffled(Subset(rows, range(80))), DataLoader(Subset(rows, range(80, 100)))) == {}
    assert _of(_shuffled(Rows(seed=1)), DataLoader(Rows(seed=2))) == {}


def test_samplers_that_split_one_dataset_are_compared_by_their_indices() -> None:
    rows = Rows()

    def drawn(indices: Sequence[int]) -> DataLoader[Any]:
        return _shuffled(rows, sampler=SubsetRandomSampler(indices))

    assert _of(drawn(range(80)), drawn(range(80, 100))) == {}
    assert "2 of the 21 samples" in _of(drawn(range(81)), drawn(range(79, 100)))["in-train-and-validation"].evidence
    half = WeightedRandomSampler([1.0] * 50 + [0.0] * 50, 100)
    assert _of(_shuffled(rows, sampler=half), drawn(range(50, 100))) == {}


def test_subsets_of_two_copies_of_the_data_with_other_transforms_are_compared_by_their_indices() -> None:
    training, validation = Rows(transform=_noisy), Rows(transform=torch.from_numpy)
    finding = _of(_shuffled(Subset(training, range(90))), DataLoader(Subset(validation, range(80, 100))))
    assert "10 of the 20 samples" in finding["in-train-and-validation"].evidence
    assert _of(_shuffled(Subset(training, range(80))), DataLoader(Subset(validation, range(80, 100)))) == {}


def test_samples_that_were_oversampled_before_they_were_split_are_found() -> None:
    rare, common = Rows(20), Rows(60, seed=1)
    both = ConcatDataset([rare, rare, rare, common])
    order = np.random.default_rng(0).permutation(len(both)).tolist()
    found = _compared(_shuffled(Subset(both, order[:90])), DataLoader(Subset(both, order[90:])))
    assert found["listed_twice"] > 0
    (shared,) = found["shared_samples"]
    assert shared.extent == "partly"
    assert not _findings(_measured(**found))["in-train-and-validation"].is_uncertain


def test_oversampling_after_the_split_is_a_fact_and_no_finding() -> None:
    rare, common = Rows(20), Rows(60, seed=1)
    training = ConcatDataset([*[Subset(rare, range(15))] * 3, Subset(common, range(50))])
    found = _measured(
        **_compared(
            _shuffled(training), DataLoader(ConcatDataset([Subset(rare, range(15, 20)), Subset(common, range(50, 60))]))
        )
    )
    assert _findings(found) == {}
    assert "has 15 samples more than once (oversampling)" in render(found, diagnose(found))


def test_an_evaluation_of_the_training_data_is_a_fact_and_no_finding() -> None:
    rows = Rows()
    for evaluated in (rows, Rows(transform=_noisy)):
        found = _measured(**_compared(_shuffled(rows), DataLoader(evaluated)))
        assert _findings(found) == {}
        assert "val_loader evaluates the samples that the loop trains on, all 100" in " ".join(
            render(found, diagnose(found)).split()
        )


def test_an_evaluation_of_a_part_of_the_training_data_may_be_meant_so() -> None:
    rows = Rows()
    finding = _of(_shuffled(rows), DataLoader(Subset(rows, range(20))))["in-train-and-validation"]
    assert finding.is_uncertain
    assert "how well the training data is learned" in finding.remedy


def test_an_index_that_an_evaluation_lists_twice_counts_once() -> None:
    rows = Rows()
    evaluated = ConcatDataset([Subset(rows, [80, 81]), Subset(rows, [80, 90])])
    (shared,) = _compared(_shuffled(Subset(rows, range(85))), DataLoader(evaluated))["shared_samples"]
    assert (shared.samples, shared.compared, shared.extent) == (2, 3, "partly")


# ── which loaders evaluate ──────────────────────────────────────────────────────────────────────────────────


def test_loaders_that_evaluate_are_known_by_their_names_where_the_program_holds_them() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.valLoader = DataLoader(Rows())
            self.train_eval_loader = DataLoader(Rows())

    def program() -> tuple[EvaluationLoaders, Any]:
        trainer, loaders = Trainer(), {"train": training, "dev": _shuffled(Rows())}
        unlabeled_loader, other = _shuffled(Rows()), DataLoader(Rows())
        noted = EvaluationLoaders()
        noted.look_around()
        return noted, (trainer, loaders, unlabeled_loader, other)

    training = _shuffled(Rows())
    names = {one.name for one in program()[0].evaluations(training)}
    assert names == {"trainer.valLoader", "loaders['dev']", "other"}  # in order, where the training is shuffled


def test_a_loop_without_gradients_evaluates_and_one_with_gradients_does_not() -> None:
    def program() -> tuple[EvaluationLoaders, dict[str, DataLoader[Any]]]:
        noted, val_loader, second = EvaluationLoaders(), DataLoader(Rows()), _shuffled(Rows())
        noted.look_around()
        return noted, {"val_loader": val_loader, "second": second}

    training = _shuffled(Rows())
    noted, loaders = program()
    assert [one.name for one in noted.evaluations(training)] == ["val_loader"]
    noted.note_request(loaders["val_loader"], has_gradients=True)
    noted.note_request(loaders["second"], has_gradients=False)
    assert [one.name for one in noted.evaluations(training)] == ["second"]


# ── origins ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_origins_are_the_indices_below_all_subsets_and_concatenations() -> None:
    one, other = Rows(10), Rows(5)
    nested = Subset(ConcatDataset([Subset(one, [9, 8, 7]), other]), [2, -1, 0, 2])
    first, second = origins_of(_shuffled(nested)) or ()
    assert (first.dataset, first.indices.tolist()) == (one, [7, 9, 7])
    assert (second.dataset, second.indices.tolist()) == (other, [4])


class Numbers(IterableDataset[int]):
    """A stream."""

    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers()),
        DataLoader(Rows(4), sampler=(index for index in range(4))),  # type: ignore[arg-type]
        DataLoader(Rows(4), sampler=["0", "1"]),  # type: ignore[list-item]
        DataLoader(Subset(Rows(4), [torch.tensor([0, 1])])),  # type: ignore[list-item]
    ],
)
def test_samples_that_cannot_be_known_are_not_compared(loader: DataLoader[Any]) -> None:
    assert _compared(loader, loader)["shared_samples"] == ()


# ── samplers of one's own ───────────────────────────────────────────────────────────────────────────────────


class Drawn(Sampler[int]):
    """A sampler of one's own that draws from a part of the data, with a random state of its own and from the global."""

    def __init__(self, data: Any, indices: Sequence[int], *, endless: bool = False) -> None:
        self.data, self.indices, self.endless = data, list(indices), endless
        self.random = np.random.default_rng(0)
        self.epochs = 0

    def __iter__(self) -> Any:
        while True:
            self.epochs += 1
            torch.randperm(3)
            yield from self.random.permutation(self.indices).tolist()
            if not self.endless:
                return


class Batches:
    """A batch sampler of one's own."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        yield from ([index] for index in self.sampler)

    def __len__(self) -> int:
        return 81


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_what_a_sampler_of_ones_own_draws_is_known_from_a_copy_of_it(*, endless: bool, batched: bool) -> None:
    rows = Rows()
    sampler = Drawn(rows, range(81), endless=endless)
    training = DataLoader(rows, batch_sampler=Batches(sampler)) if batched else DataLoader(rows, sampler=sampler)
    state, before = torch.get_rng_state(), sampler.random.bit_generator.state
    found = _compared(training, DataLoader(Subset(rows, range(80, 100))))
    assert [(one.samples, one.examples[0]) for one in found["shared_samples"]] == [(1, 80)]
    assert endless or found["listed_twice"] == 0
    assert (sampler.epochs, sampler.random.bit_generator.state) == (0, before)
    assert torch.equal(torch.get_rng_state(), state)


# ── pixels ──────────────────────────────────────────────────────────────────────────────────────────────────


def _step(images: torch.Tensor, *, model: Any = None) -> dict[str, Finding]:
    recorder, model = StepCallRecorder(), model or torch.nn.Conv2d(images.shape[1], 4, 3)
    for _ in range(2):
        recorder.enter()
        model(images)
        recorder.leave()
    return _findings(_measured(step_calls=recorder.result()))


def test_pixels_that_were_not_scaled_are_named() -> None:
    pixels = torch.randint(0, 256, (4, 3, 8, 8)).float()
    pixels[0, 0, 0, 0] = 255
    finding = _step(pixels)["images-not-scaled"]
    assert finding.is_uncertain
    assert "float32 [4, 3, 8, 8]" in finding.evidence
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    normalised = _step((pixels - mean[:, None, None]) / std[:, None, None])["images-not-scaled"]
    assert not normalised.is_uncertain
    assert "ImageNet" in normalised.cause
    normalising = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 4, 3))
    assert _step(pixels, model=normalising) == {}


@pytest.mark.parametrize(
    "images",
    [
        torch.rand(4, 3, 8, 8),
        torch.randint(0, 256, (4, 3, 8, 8)).float() / 255,
        torch.randint(0, 256, (4, 3, 8, 8)).float() - 128,
        torch.randint(0, 30, (4, 1, 8, 8)).float(),
        torch.randint(0, 256, (4, 17, 8, 8)).float(),
        torch.randint(0, 4096, (4, 1, 8, 8)).float() + 300,
    ],
)
def test_other_images_are_not_taken_for_pixels(images: torch.Tensor) -> None:
    assert _step(images) == {}


def test_a_convolution_after_the_first_is_no_model_input() -> None:
    def model(images: torch.Tensor) -> None:
        torch.nn.functional.conv2d(images / 255, torch.ones(1, 3, 1, 1))
        torch.nn.functional.conv2d(images, torch.ones(1, 3, 1, 1))

    assert _step(torch.full((2, 3, 4, 4), 200.0), model=model) == {}


@pytest.mark.parametrize(
    ("samples", "options", "why"),
    [
        (3, {"drop_last": True}, "drop_last=True leaves out the only one, of 3 samples where batch_size is 4; take"),
        (0, {}, "give it a dataset and a sampler that have samples"),
    ],
)
def test_an_epoch_without_a_batch_says_why(samples: int, options: dict[str, Any], why: str) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(samples, 2)), batch_size=4, **options)
    with pytest.raises(RuntimeError, match=re.escape(f"an epoch of this loader has no batch: {why}")):
        BatchSource("as is", lambda: loader).next_batch()


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (["abcd abcd", "efgh efgh"], (True, False)),
        (["abcd efgh", "abcd efgh"], (False, True)),
        (["abcd efgh", "ijkl mnop"], (False, False)),
        (["abab abab", "bbab bbab"], (False, False)),  # flipped or not: chance
        (["aaaa aaaa", "aaaa aaaa"], None),
    ],
)
def test_noise_that_repeats_is_told_from_chance(
    epochs: list[str], expected: tuple[bool, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([[list(worker) for worker in epoch.split()] for epoch in epochs])
    monkeypatch.setattr(worker_noise, "_make_one_sample", lambda loader, index: next(made))
    found = worker_noise.measure_worker_noise(DataLoader(Rows(4)))
    assert (found and (found.same_in_workers, found.same_in_epochs)) == expected
