"""What `penstock.open` opens, in torch's own DataLoader."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_files import write_samples
from torch.utils.data import DataLoader

import penstock
from penstock.data.source import Source
from penstock.data.stream import Stream

COUNT = 25


@pytest.fixture(params=["tar", "jsonl", "hdf5", "arrow"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    suffix = {"hdf5": "h5"}.get(request.param, request.param)
    samples = [{"x": np.full(3, number, np.float32), "y": np.int64(number)} for number in range(COUNT)]
    for part in range(3):
        write_samples(tmp_path / f"train-{part}.{suffix}", samples[part::3])
    dataset = penstock.open(tmp_path, fields=["x", "y"])
    yield dataset
    dataset.close()


def labels(loader: DataLoader[Any]) -> Counter[int]:
    counted: Counter[int] = Counter()
    for batch in loader:
        assert batch["x"].dtype == torch.float32
        assert batch["x"].shape == (len(batch["y"]), 3)
        torch.testing.assert_close(batch["x"][:, 0], batch["y"].float())
        counted.update(batch["y"].tolist())
    return counted


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # arrays of Arrow files are views of them
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_comes_once_an_epoch(dataset: Source | Stream, workers: int) -> None:
    shuffle = isinstance(dataset, Source)
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, shuffle=shuffle)
    for _ in range(2):
        assert labels(loader) == Counter(range(COUNT))


def test_formats_are_read_without_penstocks_loader(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "a.jsonl", [{"x": np.int64(1)}])
    code = f"""
import sys
import penstock.data.open
from torch.utils.data import DataLoader
assert next(iter(DataLoader(penstock.data.open.open({str(path)!r}))))["x"].item() == 1
loaded = [name for name in sys.modules if name.startswith("penstock.loader")]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
