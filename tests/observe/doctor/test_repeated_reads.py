"""A file or folder that every sample reads again is found, with the lines that read it."""

from __future__ import annotations

import gc
import glob
import json
import os
import sys
import textwrap
from collections.abc import Container
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.observe.doctor.probe_results import RepeatedRead
from penstock.observe.doctor.probes.line_sampler import LineSampler, find_line
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder, reading_lines
from penstock.observe.doctor.probes.time_limit import time_limit


class Looks:
    """Stands for a LineSampler that saw most of the time in any lines."""

    def __init__(self) -> None:
        self.numbers: Container[int] = ()

    def fraction_of(self, file: str, numbers: Container[int]) -> float:
        assert file == __file__
        self.numbers = numbers
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


@pytest.mark.parametrize(
    ("opening", "lines"),
    [
        ("values = np.load(path)", {3}),
        ("with open(path) as file:\n        rows = file.read()\n        row = rows[1]", {3, 4, 5}),
        ("file = open(path)\n    other = 1\n    rows = json.load(file)", {3, 5}),
        ("for row in csv.reader(open(path)):\n        last = row", {3, 4}),
        ("return json.loads(\n        open(path).read()\n    )", {3, 4, 5}),
    ],
)
def test_what_reads_is_the_statement_the_block_or_what_uses_the_open_file(
    opening: str, lines: set[int], tmp_path: Path
) -> None:
    file = tmp_path / "dataset.py"
    file.write_text(f"import csv\ndef make(path):\n    {opening}\n    transform()\n")
    opens = next(
        number for number, line in enumerate(file.read_text().splitlines(), 1) if "(path)" in line and number > 2
    )
    assert reading_lines(str(file), opens) == lines


def test_a_file_without_a_source_is_its_line_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(textwrap.dedent("def make(:\n  open(path)"))
    assert reading_lines(str(tmp_path / "broken.py"), 2) == {2}
    assert reading_lines(str(tmp_path / "gone.py"), 2) == {2}


def test_what_penstock_does_in_a_garbage_collection_is_the_line_that_caused_it() -> None:
    seen = []

    class Noting:
        def __eq__(self, other: object) -> bool:  # called by gc.callbacks.remove, in the frame of time_limit
            seen.append(find_line(sys._getframe().f_back))
            return False

        def __call__(self, phase: str, info: object) -> None:
            """Is a callback as any."""

    gc.callbacks.insert(0, Noting())
    try:
        with time_limit(60.0, TimeoutError):
            pass
    finally:
        del gc.callbacks[0]
    assert seen
    assert all(line is not None and line[0] == __file__ for line in seen)
