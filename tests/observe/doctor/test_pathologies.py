"""The doctor on loops with one known problem each, and on healthy loops: the scripts of tests/pathologies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("preloaded_python")]

_FOLDER = Path(__file__).parents[2] / "pathologies"
_EXAMINED = Path(__file__).parents[2] / "support" / "examined.py"

# script: what the verdict may be, the finding that must be there, words that its remedy must have, seconds
_SEEDED = {
    "decode_at_full_size": ({"decode-bound", "transform-bound"}, "full-size-decode", "image.draft", 4),
    "decode_in_the_training_process": ({"decode-bound"}, "no-workers", "num_workers=", 4),
    "slow_storage": ({"storage-bound"}, "too-few-workers", "num_workers=4", 5),
    "cold_files": ({"storage-bound"}, "cold-reads", "page cache|free memory", 4),
    "transform_in_python": ({"transform-bound"}, None, "num_workers|augment", 4),
    "collate_by_hand": ({"collate-bound"}, None, "num_workers|__getitem__", 4),
    "lists_of_numbers": ({"collate-bound"}, "python-numbers", "torch.tensor", 3),
    "large_batches_transported": ({"transport-bound"}, None, "penstock.DataLoader|penstock import|num_workers=0", 5),
    "tiny_batches": ({"transport-bound"}, "workers-cost-more", "num_workers=0", 3),
    "a_slow_class": ({"transform-bound"}, "slow-samples", "dataset[", 4),
    "short_epochs": ({"start-up-bound"}, "short-epochs", "persistent_workers=True", 3),
    "iterator_recreated": ({"transform-bound", "start-up-bound"}, "iterator-recreated", "batches = iter(loader)", 3),
    "pickled_for_each_worker": (None, "pickled-for-each-worker", "self.rows", 6),
    "copied_on_write": ({"compute-bound"}, "copy-on-write", "self.annotations = numpy.array(self.annotations)", 4),
    "threads_in_workers": ({"transform-bound"}, "threads-in-workers", "torch.set_num_threads(1)", 12),
    "threads_after_a_fork": ({"workers-hang"}, "workers-hang", 'multiprocessing_context="forkserver"', 3),
    "too_many_workers": (None, "too-many-workers", "num_workers=", 5),
    "quota_below_the_cores": (None, "cpu-quota", "num_workers=1", 3),
    "batches_beyond_shm": (None, "shm-too-small", "--shm-size=", 4),
    "item_in_the_loop": ({"compute-bound"}, "sync-every-step", "loss.detach()", 3),
    "non_blocking_from_pageable": ({"compute-bound"}, "non-blocking-from-pageable", "pin_memory=True", 3),
    "cached_in_each_worker": ({"compute-bound"}, "cache-in-each-worker", "self.cache", 4),
    "stream_not_sharded": (None, "stream-not-sharded", "get_worker_info()", 3),
    "double_precision": ({"transport-bound"}, "double-precision", "float32", 4),
    "archive_opened_for_each_sample": ({"decode-bound"}, None, "Archived.__getitem__|num_workers", 4),
    "a_lock_between_workers": ({"transform-bound"}, None, "compute (work.py|what workers share|num_workers", 4),
    "pinned_without_accelerator": ({"compute-bound"}, "pinned-without-accelerator", "pin_memory=torch.accelerator", 3),
}
_HEALTHY = sorted(file.stem for file in _FOLDER.glob("healthy_*.py"))


def _doctor(script: str, seconds: float, tmp_path: Path) -> dict[str, Any]:
    path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(_EXAMINED), script, str(seconds), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("script", _SEEDED)
def test_the_pathology_is_named_with_the_line_to_change(script: str, tmp_path: Path) -> None:
    verdicts, name, words, seconds = _SEEDED[script]
    found = _doctor(script, seconds, tmp_path)
    assert verdicts is None or found["verdict"]["name"] in verdicts, found["text"]
    named = [finding for finding in found["findings"] if name in (None, finding["name"])]
    remedies = [finding["remedy"] for finding in named] + ([found["verdict"]["remedy"]] if name is None else [])
    assert any(word in remedy for remedy in remedies for word in words.split("|")), found["text"]


@pytest.mark.parametrize("script", _HEALTHY)
def test_a_healthy_loop_is_called_healthy(script: str, tmp_path: Path) -> None:
    found = _doctor(script, 4, tmp_path)
    assert (found["verdict"]["name"], found["findings"]) == ("healthy", []), found["text"]


def test_every_script_is_tried() -> None:
    scripts = {file.stem for file in _FOLDER.glob("*.py")} - {"work"}
    assert scripts == {*_SEEDED, *_HEALTHY}
