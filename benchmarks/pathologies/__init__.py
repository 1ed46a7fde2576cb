"""Training loops with one known problem each, and healthy ones, for `python -m benchmarks.doctor` and the tests.

They are programs as users write them: `python -m benchmarks.examined_loop` runs one with this folder on its path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from penstock.observe.doctor.causes import Diagnosis

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the doctor is to say of a loop."""

    verdicts: frozenset[str] = frozenset()
    """The verdict is one of these; empty where any will do."""

    finding: str = ""
    """The name of the finding; empty where the verdict's remedy, or any finding's, may have the words."""

    words: tuple[str, ...]
    """The remedy has one of these."""

    seconds: float
    """How long the loop is examined."""

    is_timed: bool = True
    """Whether the problem shows by durations alone: then a busy machine can hide it."""

    def is_named_in(self, diagnosis: Diagnosis) -> bool:
        """Return whether `diagnosis` has the finding, with what to change."""
        findings = [one for one in diagnosis.findings if self.finding in ("", one.name)]
        remedies = [one.remedy for one in findings] + ([] if self.finding else [diagnosis.verdict.remedy])
        return any(word in remedy for remedy in remedies for word in self.words)

    def is_first_in(self, diagnosis: Diagnosis) -> bool:
        """Return whether what `diagnosis` says first is this problem: in its verdict, and in its first finding."""
        verdict, findings = diagnosis.verdict, diagnosis.findings
        is_verdict = not self.verdicts or verdict.name in self.verdicts
        return is_verdict and self.is_named_in(replace(diagnosis, findings=findings[:1]))


def _problem(verdicts: str, finding: str, words: str, seconds: float, *, is_timed: bool = True) -> Problem:
    return Problem(
        verdicts=frozenset(verdicts.split()),
        finding=finding,
        words=tuple(words.split("|")),
        seconds=seconds,
        is_timed=is_timed,
    )


PROBLEMS = {
    "decode_at_full_size": _problem("samples-bound", "full-size-decode", "image.draft", 4),
    "decode_in_the_training_process": _problem("samples-bound", "no-workers", "num_workers=", 3),
    "slow_storage": _problem("waiting-bound", "too-few-workers", "num_workers=", 5),
    "cold_files": _problem("waiting-bound samples-bound", "cold-reads", "page cache|free memory", 4),
    "transform_in_python": _problem("samples-bound", "costly-line", "transform_in_python.py", 4),
    "collate_by_hand": _problem("collate-bound", "", "num_workers|__getitem__", 4),
    "lists_of_numbers": _problem("collate-bound", "python-numbers", "torch.tensor", 2.5),
    "large_batches_transported": _problem(
        "transport-bound", "", "penstock.DataLoader|penstock import|num_workers=0", 5
    ),
    "tiny_batches": _problem("transport-bound", "workers-cost-more", "num_workers=0", 3),
    "a_slow_class": _problem("samples-bound", "slow-samples", "dataset[", 4),
    "short_epochs": _problem("start-up-bound", "short-epochs", "persistent_workers=True", 3),
    "iterator_recreated": _problem(
        "samples-bound start-up-bound", "iterator-recreated", "batches = iter(loader)", 3, is_timed=False
    ),
    "copied_on_write": _problem(
        "compute-bound", "copy-on-write", "self.annotations = penstock.shared(self.annotations)", 3, is_timed=False
    ),
    "threads_in_workers": _problem("samples-bound", "threads-in-workers", "torch.set_num_threads(1)", 8),
    "too_many_workers": _problem("", "too-many-workers", "num_workers=", 5),
    "quota_below_the_cores": _problem("", "cpu-quota", "num_workers=1", 2, is_timed=False),
    "batches_beyond_shm": _problem("", "shm-too-small", "--shm-size=", 2.5, is_timed=False),
    "item_in_the_loop": _problem("", "sync-every-step", "loss.detach()", 2, is_timed=False),
    "non_blocking_from_pageable": _problem("", "non-blocking-from-pageable", "pin_memory=True", 2, is_timed=False),
    "cached_in_each_worker": _problem("compute-bound", "cache-in-each-worker", "self.cache", 2.5, is_timed=False),
    "same_noise_in_workers": _problem("", "same-noise", "torch.initial_seed()", 2),
    "stream_not_sharded": _problem("", "stream-not-sharded", "get_worker_info()", 2, is_timed=False),
    "double_precision": _problem("transport-bound", "float64-samples", "float32", 3),
    "archive_opened_for_each_sample": _problem(
        "samples-bound", "opened-for-each-sample", "open it once in each worker", 4
    ),
    "a_lock_between_workers": _problem("samples-bound", "", "work.py|what workers share|num_workers", 4),
    "a_dictionary_of_a_manager": _problem("", "another-process-for-each-sample", "keep the data in the dataset", 5),
    "a_row_of_a_table": _problem("samples-bound", "table-row-for-each-sample", "to_numpy()", 5),
    "logging_in_every_sample": _problem("", "logging-per-sample", "log once per epoch", 5),
    "labels_parsed_for_each_sample": _problem("", "read-again-for-each-sample", "read it once, in __init__", 5),
    "folder_listed_for_each_sample": _problem("", "read-again-for-each-sample", "list it once, in __init__", 5),
    "saved_in_every_step": _problem("compute-bound", "saves-every-step", "save once per epoch", 4),
    "sorted_by_class": _problem("", "one-label", "shuffle=True", 2, is_timed=False),
    "split_overlaps": _problem("", "in-train-and-validation", "random_split", 1, is_timed=False),
    "gradients_added_up": _problem("", "gradients-not-cleared", "zero_grad()", 2, is_timed=False),
    "trained_in_evaluation_mode": _problem("", "trains-in-evaluation-mode", "model.train()", 2, is_timed=False),
    "two_softmaxes": _problem("", "loss-of-probabilities", "no softmax", 2, is_timed=False),
    "compared_with_all_labels": _problem("", "loss-of-all-pairs", "labels[:, None]", 2, is_timed=False),
    "pixels_not_scaled": _problem("", "images-not-scaled", "divide by 255", 2, is_timed=False),
    "seed_in_every_sample": _problem("", "constant-seed", "take it out", 2, is_timed=False),
    "cycled_loader": _problem("", "cycled", "yield from loader", 1, is_timed=False),
    "copied_for_each_sample": _problem("", "copied-for-each-sample", "copy only", 5),
    "kept_in_the_dataset": _problem("compute-bound", "kept-by-the-dataset", "self.history", 2.5, is_timed=False),
    "validated_often": _problem("start-up-bound", "other-loader-restarted", "make that loader once", 3),
    "stream_read_by_each_worker": _problem("", "each-worker-reads-all", "get_worker_info()", 4),
}

HEALTHY = tuple(sorted(file.stem for file in FOLDER.glob("healthy_*.py")))
"""Loops of which nothing is to be said."""
