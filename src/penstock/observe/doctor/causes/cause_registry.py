"""Every cause that the doctor looks for, in the order in which findings are reported.

To add one: write it in the file of its topic (or a new file), and add one line here.
"""

from __future__ import annotations

from penstock.observe.doctor.causes import (
    epochs,
    failures,
    memory,
    processors,
    sample_lines,
    samples,
    step,
    training,
    worker_count,
)
from penstock.observe.doctor.causes.cause import Cause

ABOUT_STEP: tuple[Cause, ...] = (
    step.debugging_every_step,
    *step.STEP_PATTERNS,
    step.steps_grow,
    processors.cpu_contention,
)
"""Causes that make steps slow, or lie between them: before those about loading where the loop hardly waits."""

NOT_ABOUT_LOADING: tuple[Cause, ...] = (
    memory.copy_on_write,
    memory.cache_in_each_worker,
    memory.shm_too_small,
    memory.prefetches_much,
    *ABOUT_STEP,
    step.sync_every_step,
    step.non_blocking_from_pageable,
    step.pinned_without_accelerator,
)
"""Causes about the step and about memory: they ask for a change, and do not explain why a loop waits for data."""

FAILURES: tuple[Cause, ...] = (
    failures.fails,
    failures.stream_not_sharded,
    failures.constant_seed,
    failures.same_noise,
    failures.values_not_finite,
    failures.one_label,
)
"""Causes that end a program, or make all that it learns wrong."""

ABOUT_RESULTS: tuple[Cause, ...] = (
    training.never_updated,
    training.gradients_not_cleared,
    training.left_out_of_optimizer,
    training.trains_in_evaluation_mode,
    training.loss_of_probabilities,
    training.loss_of_all_pairs,
    training.in_train_and_validation,
    training.images_not_scaled,
    epochs.cycled,
    epochs.same_order,
    epochs.not_shuffled,
    samples.float64_samples,
    memory.kept_by_the_program,
    memory.kept_by_the_dataset,
)
"""Causes that make a result wrong, or that fill the memory until a program ends, and no loop slow."""

CAUSES: tuple[Cause, ...] = (
    *FAILURES,
    *ABOUT_RESULTS,
    epochs.iterator_recreated,
    processors.cpu_quota,
    processors.threads_beyond_cores,
    processors.threads_in_workers,
    worker_count.each_reads_all,
    worker_count.too_many_workers,
    epochs.short_epochs,
    epochs.other_loader_restarted,
    sample_lines.read_again_for_each_sample,
    *sample_lines.LINE_PATTERNS,
    samples.full_size_decode,
    samples.slow_samples,
    samples.cold_reads,
    samples.python_numbers,
    sample_lines.costly_sampler_start,
    sample_lines.costly_sampler,
    sample_lines.costly_collate,
    samples.made_one_by_one,
    worker_count.workers_do_not_scale,
    worker_count.no_workers,
    worker_count.waiting_samples,
    worker_count.workers_cost_more,
    sample_lines.costly_line,
    *worker_count.BETTER_SETTINGS,
    *NOT_ABOUT_LOADING,
)
