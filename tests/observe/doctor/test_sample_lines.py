"""Lines of a dataset that do for every sample what is done once: each is found where it stands, with its advice."""

from __future__ import annotations

import gzip
import json
import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine, RepeatedRead, SampleCosts
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.worker_noise import measure_worker_noise
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial


class Zipped(Numbered):
    """Reads through a compressed file for every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.path = folder / "rows.gz"
        with gzip.open(self.path, "wb") as file:
            file.write(np.random.default_rng(0).bytes(1 << 19))

    def __getitem__(self, index: int) -> Any:
        with gzip.open(self.path) as file:
            return torch.from_numpy(np.frombuffer(file.read()[:64], np.uint8).copy())


class Logging(Numbered):
    """Logs every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.logger = logging.getLogger("penstock.tests.samples")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.handlers = [logging.FileHandler(folder / "samples.log", delay=True)]

    def __getitem__(self, index: int) -> Any:
        for _ in range(20):
            self.logger.info("sample %d", index)
        return torch.tensor(index)


class Parsing(Numbered):
    """Parses all labels for every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.path = folder / "labels.json"
        self.path.write_text(json.dumps({str(number): [number] for number in range(5000)}))

    def __getitem__(self, index: int) -> Any:
        with open(self.path) as file:
            labels = json.load(file)
        return torch.tensor(labels[str(index)])


def _measure(dataset: Any) -> Measurements:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=8)
    for seconds in (0.3, 1.0, 3.0, 12.0):  # on a busy machine it takes longer until the thread has been looked at often
        probe = SampleProbe(loader, seconds)
        probe.run()
        assert probe.error == ""
        found = _measured(probe.costs())
        if diagnose(found).findings:
            break
    return found


def _measured(samples: SampleCosts | None) -> Measurements:
    windows = tuple(
        TimingWindow(batches=1, wall_s=wall_s, wait_s=wall_s - 0.001, step_s=0.001) for wall_s in (1.0, 1.0)
    )
    free = tuple(TimingWindow(batches=1, wall_s=0.001, wait_s=0.0, step_s=0.001) for _ in windows)
    return Measurements(
        name="x",
        machine=Machine(cores=1),
        settings=Settings(dataset="D"),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=windows), Trial(name=FREE, windows=free)),
        samples=samples,
    )


@pytest.fixture
def _closed_logs() -> Iterator[None]:
    yield
    for handler in logging.getLogger("penstock.tests.samples").handlers:
        handler.close()


@pytest.mark.usefixtures("_closed_logs")
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (Zipped, "opened-for-each-sample", "gzip"),
        (Parsing, "read-again-for-each-sample", "with open(self.path)"),
        (Logging, "logging-per-sample", "self.logger.info"),
    ],
)
def test_what_is_done_for_every_sample_is_named_with_its_line(kind: Any, name: str, text: str, tmp_path: Path) -> None:
    diagnosis = diagnose(_measure(kind(tmp_path)))
    assert diagnosis.findings[0].name == name, diagnosis
    assert "test_sample_lines.py:" in diagnosis.findings[0].evidence
    assert text in diagnosis.findings[0].evidence
    assert diagnosis.verdict.remedy == diagnosis.findings[0].remedy


class Searching(torch.utils.data.Sampler[int]):
    """Looks at all of a list for each index."""

    def __iter__(self) -> Iterator[int]:
        return (sum(number == index for number in range(5000)) + index - 1 for index in range(64))


def test_the_time_of_a_sampler_is_measured_beside_that_of_its_samples() -> None:
    for sampler, is_slow in ((Searching(), True), (None, False)):
        probe = SampleProbe(DataLoader(Numbered(64), batch_size=8, sampler=sampler), 0.3)
        probe.run()
        costs = probe.costs()
        assert costs is not None
        assert (costs.sampler_s > costs.batch_s) is is_slow


def test_a_collate_function_of_the_programs_own_is_named_where_it_takes_most_of_a_batch() -> None:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=1e-4, median_s=1e-4, collate_s=0.005)
    measured = _measured(costs)
    for own, names in ((True, ["costly-collate"]), (False, [])):
        settings = replace(measured.settings, collates_by_default=not own)
        assert [one.name for one in diagnose(replace(measured, settings=settings)).findings] == names


def _named(*lines: HotLine, **changes: Any) -> list[str]:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=0.01, median_s=0.01, lines=lines)
    return [finding.name for finding in diagnose(_measured(replace(costs, **changes))).findings]


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ("gzip.open", "opened-for-each-sample"),
        ("pandas.core.indexing._iLocIndexer._getitem_axis", "table-row-for-each-sample"),
        ("subprocess.run", "another-process-for-each-sample"),
        ("json.decoder.JSONDecoder.decode", "parsed-for-each-sample"),
        ("copy.deepcopy", "copied-for-each-sample"),
        ("copyreg.__reduce_ex__", "costly-line"),
        ("", "costly-line"),
    ],
)
def test_a_costly_line_is_named_by_the_library_that_it_calls_and_else_by_its_time(calls: str, name: str) -> None:
    found = HotLine(line="train.py:3: x = gzip.open(copy.deepcopy(self.rows[index]))", calls=calls, fraction=0.8)
    assert _named(found) == [name]
    assert _named(replace(found, fraction=0.15)) == []


def test_what_is_done_for_nothing_is_named_before_work_that_takes_longer_if_it_is_not_little() -> None:
    work = HotLine(line="train.py:9: image = image.rotate(angle)", calls="PIL.Image.Image.rotate", fraction=0.6)
    log = HotLine(line="train.py:7: logger.info(index)", calls="logging.Logger.info", fraction=0.25)
    assert _named(work, log)[0] == "logging-per-sample"
    assert _named(work, replace(log, fraction=0.12)) == ["costly-line"]
    assert _named(work, replace(log, calls="json.loads")) == ["costly-line"], "work can only be made faster"


def test_lines_that_together_take_most_of_a_sample_are_named_and_cheap_samples_have_none() -> None:
    lines = tuple(HotLine(line=f"train.py:{at}: end -= {at}", fraction=0.25) for at in (3, 4, 5))
    assert _named(*lines) == ["costly-line"]
    assert _named(*lines[:2]) == []
    assert _named(*lines, median_s=2e-5) == []


def _reading(read: RepeatedRead, *lines: HotLine) -> Measurements:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=0.01, median_s=0.01, repeated_read=read, lines=lines)
    return _measured(costs)


def test_the_finding_says_what_to_read_once() -> None:
    read = RepeatedRead(name="all.npy", is_folder=False, line="train.py:9: a = np.load(path)", fraction=0.8, samples=64)
    finding = diagnose(_reading(read)).findings[0]
    assert finding.name == "read-again-for-each-sample"
    assert finding.cause.endswith("all.npy.")
    assert finding.remedy.startswith("train.py:9: read it once, in __init__")
    assert "list it once" in diagnose(_reading(replace(read, is_folder=True))).findings[0].remedy
    assert not diagnose(_reading(replace(read, fraction=0.3))).findings


def test_an_archive_is_named_as_such_alone() -> None:
    read = RepeatedRead(name="a.gz", is_folder=False, line="train.py:9: gzip.open(path)", fraction=0.8, samples=64)
    line = HotLine(line="train.py:9: file = gzip.open(path)", calls="gzip.open", fraction=0.8)
    assert [finding.name for finding in diagnose(_reading(read, line)).findings] == ["opened-for-each-sample"]


class Flawed(Numbered):
    """One sample divides by zero."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([1.0]) / (0.0 if index == 3 else 2.0), "label": "a"}


def test_a_sample_with_a_value_that_is_not_finite_is_named() -> None:
    finding = diagnose(_measure(Flawed(64))).findings[0]
    assert (finding.name, "dataset[3]" in finding.evidence) == ("values-not-finite", True)


class Noisy(Numbered):
    """Draws from a generator of its own, or from NumPy's."""

    def __init__(self, size: int, *, own: bool) -> None:
        super().__init__(size)
        self.random = np.random.default_rng(0) if own else np.random

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.random.normal(index, 1.0, 4))


@pytest.mark.usefixtures("preloaded_python")
def test_a_generator_that_workers_have_a_copy_of_is_found_and_numpys_own_is_not() -> None:
    fork = multiprocessing.get_context("fork")
    for own, repeats in ((True, True), (False, False)):
        loader = DataLoader(Noisy(64, own=own), batch_size=4, num_workers=2, multiprocessing_context=fork)
        noise = measure_worker_noise(loader)
        assert noise is not None
        assert (noise.same_in_workers, noise.same_in_epochs) == (repeats, repeats)
    assert measure_worker_noise(DataLoader(Numbered(64), batch_size=4, num_workers=2)) is None
