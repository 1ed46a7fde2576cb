"""A file or folder that every sample reads again is found, with the lines that read it."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.observe.doctor.probe_results import RepeatedRead
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder


class Looks:
    """Stands for a LineSampler that saw most of the time in any function of this file."""

    def fraction_of(self, file: str, function: str) -> float:
        assert file == __file__
        assert "<locals>." in function
        return 0.8


def _read(make: Any, samples: int = 8) -> RepeatedRead | None:
    reads = ReadRecorder()
    for index in range(samples):
        with reads.sample(index):
            make(index)
    return reads.result(cast(LineSampler, Looks()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "labels.json").write_text(json.dumps({str(index): index for index in range(64)}))
    np.save(tmp_path / "all.npy", np.zeros((64, 4)))
    for index in range(64):
        torch.save(torch.zeros(4), tmp_path / f"{index}.pt")
    return tmp_path


def test_a_file_that_every_sample_reads_is_named_with_its_line(folder: Path) -> None:
    def parse(index: int) -> Any:
        with open(folder / "labels.json") as file:
            return json.load(file)[str(index)]

    found = _read(parse)
    assert found is not None
    assert (found.name, found.is_folder, found.fraction, found.samples) == ("labels.json", False, 0.8, 8)
    assert 'with open(folder / "labels.json") as file:' in found.line


def test_files_that_libraries_open_and_folders_are_seen(folder: Path) -> None:
    array = _read(lambda index: np.load(folder / "all.npy")[index])
    listed = _read(lambda index: torch.load(sorted(glob.glob(f"{folder}/*.pt"))[index]))
    assert array is not None
    assert (array.name, array.is_folder) == ("all.npy", False)
    assert listed is not None
    assert (listed.name, listed.is_folder) == (folder.name, True)


def test_files_of_their_own_and_files_that_are_written_are_none(folder: Path) -> None:
    def write(index: int) -> None:
        with open(folder / "log.txt", "a") as file:
            file.write(f"{index}\n")

    assert _read(lambda index: torch.load(folder / f"{index}.pt")) is None
    assert _read(write) is None
    assert _read(lambda index: os.urandom(4)) is None
    assert _read(lambda index: np.load(folder / "all.npy"), samples=4) is None


def test_nothing_is_noted_outside_of_samples(folder: Path) -> None:
    reads = ReadRecorder()
    for index in range(8):
        with reads.sample(index):
            pass
        np.load(folder / "all.npy")
    assert reads.result(cast(LineSampler, Looks())) is None
