"""The doctor on loops that ail from one thing each, and on loops that ail from nothing: tests/pathologies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.observe.diagnose import Diagnosis, diagnose
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.rendering import render

_FOLDER = Path(__file__).parents[1] / "pathologies"

# script: what the verdict may be, the finding that must be there, words that its remedy must have, seconds
_SEEDED = {
    "decode_at_full_size": ({"decode-bound", "transform-bound"}, "full-size-decode", "image.draft", 4),
    "decode_in_the_training_process": ({"decode-bound"}, "no-workers", "num_workers=", 4),
    "slow_storage": ({"storage-bound"}, "too-few-workers", "num_workers=4", 5),
    "cold_files": ({"storage-bound"}, "cold-reads", "page cache|free memory", 4),
    "transform_in_python": ({"transform-bound"}, None, "num_workers|augment", 4),
    "collate_by_hand": ({"collate-bound"}, None, "num_workers|__getitem__", 4),
    "lists_of_numbers": ({"collate-bound"}, "python-numbers", "torch.tensor", 3),
    "large_batches_handed_over": ({"transport-bound"}, None, "penstock.DataLoader|penstock import|num_workers=0", 5),
    "tiny_batches": ({"transport-bound"}, "workers-cost-more", "num_workers=0", 3),
    "a_slow_class": ({"transform-bound"}, "slow-samples", "dataset[", 4),
    "short_epochs": ({"start-up-bound"}, "short-epochs", "persistent_workers=True", 3),
    "iterator_made_anew": ({"transform-bound", "start-up-bound"}, "iterator-made-anew", "batches = iter(loader)", 3),
    "pickled_for_each_worker": (None, "pickled-for-each-worker", "self.rows", 6),
    "copied_on_write": ({"compute-bound"}, "copy-on-write", "self.annotations = numpy.array(self.annotations)", 4),
    "threads_in_workers": ({"transform-bound"}, "threads-in-workers", "torch.set_num_threads(1)", 12),
    "too_many_workers": (None, "too-many-workers", "num_workers=", 5),
    "quota_below_the_cores": (None, "cpu-quota", "num_workers=1", 3),
    "batches_beyond_shm": (None, "shm-too-small", "--shm-size=", 4),
    "item_in_the_loop": ({"compute-bound"}, "reads-back-every-step", "loss.detach()", 3),
    "non_blocking_from_pageable": ({"compute-bound"}, "non-blocking-from-pageable", "pin_memory=True", 3),
    "cached_in_each_worker": ({"compute-bound"}, "cache-in-each-worker", "self.cache", 4),
    "the_same_stream_in_each_worker": (None, "stream-repeats-itself", "get_worker_info()", 3),
    "double_precision": ({"transport-bound"}, "double-precision", "float32", 4),
    "archive_opened_for_each_sample": ({"decode-bound"}, None, "Archived.__getitem__|num_workers", 4),
    "a_lock_between_workers": ({"transform-bound"}, None, "compute (work.py|what workers share|num_workers", 4),
    "pinned_for_nothing": ({"compute-bound"}, "pinned-for-nothing", "pin_memory=torch.accelerator", 3),
}
_HEALTHY = sorted(file.stem for file in _FOLDER.glob("healthy_*.py"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@pytest.fixture(autouse=True)
def _as_a_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(_FOLDER))
    before, threads = set(sys.modules), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    work = sys.modules.get("work")
    if work is not None:
        work.clean_up()
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(_FOLDER) in str(sys.modules[name].__file__):
            del sys.modules[name]


def _doctor(script: str, seconds: float, tmp_path: Path) -> tuple[Diagnosis, str]:
    module = importlib.import_module(script)
    for file, text in getattr(module, "CGROUP", {}).items():
        (tmp_path / file).write_text(text)
    found = examine(getattr(module, "main", None) or module.train, name=script, seconds=seconds, cgroup=tmp_path)
    shm_nbytes = getattr(module, "SHM_NBYTES", None)
    if shm_nbytes is not None:
        found = replace(found, machine=replace(found.machine, shm_nbytes=shm_nbytes, shm_free_nbytes=shm_nbytes))
    diagnosis = diagnose(found)
    return diagnosis, render(found, diagnosis)


@pytest.mark.parametrize("script", _SEEDED)
def test_the_pathology_is_named_with_the_line_to_change(script: str, tmp_path: Path) -> None:
    verdicts, name, words, seconds = _SEEDED[script]
    diagnosis, text = _doctor(script, seconds, tmp_path)
    assert verdicts is None or diagnosis.verdict.name in verdicts, text
    if name is None:
        remedies = [diagnosis.verdict.remedy, *(finding.remedy for finding in diagnosis.findings)]
    else:
        remedies = [finding.remedy for finding in diagnosis.findings if finding.name == name]
    assert any(word in remedy for remedy in remedies for word in words.split("|")), text


@pytest.mark.parametrize("script", _HEALTHY)
def test_a_healthy_loop_is_called_healthy(script: str, tmp_path: Path) -> None:
    diagnosis, text = _doctor(script, 4, tmp_path)
    assert (diagnosis.verdict.name, diagnosis.findings) == ("healthy", ()), text


def test_every_script_is_tried() -> None:
    scripts = {file.stem for file in _FOLDER.glob("*.py")} - {"work"}
    assert scripts == {*_SEEDED, *_HEALTHY}
