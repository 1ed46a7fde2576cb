"""Every cause that the doctor looks for, in the order in which findings are reported.

To add one: write it in the file of its topic (or a new file), and add one line here.
"""

from __future__ import annotations

from penstock.observe.doctor.causes import (
    costly_parts,
    epochs,
    failures,
    layers,
    memory,
    processors,
    sample_lines,
    sample_sets,
    samples,
    step,
    step_patterns,
    stored_data,
    training,
    worker_count,
)
from penstock.observe.doctor.causes.cause import Cause

ABOUT_STEP: tuple[Cause, ...] = (
    epochs.validates_often,
    epochs.evaluates_single_samples,
    epochs.hooks_grow,
    epochs.saves_whole_storages,
    step.debugging_every_step,
    *step_patterns.STEP_PATTERNS,
    step.same_in_every_step,
    layers.denormal_numbers,
    layers.layer_in_a_loop,
    layers.padded_too_far,
    layers.backward_again,
    layers.differences_of_all_pairs,
    layers.gradients_not_used,
    layers.computes_in_double,
    layers.dense_embedding_gradients,
    layers.many_small_parameters,
    step.operations_in_a_loop,
    step.prepared_in_step,
    step.costly_step_line,
    step.computes_outside_torch,
    step.costly_now_and_then,
    step.steps_grow,
)
"""Causes that make steps slow, or lie between them: before those about loading where the loop hardly waits."""

NOT_ABOUT_LOADING: tuple[Cause, ...] = (
    memory.copy_on_write,
    memory.cache_in_each_worker,
    memory.not_picklable,
    memory.pickled_for_each_worker,
    memory.shm_too_small,
    memory.prefetches_much,
    *ABOUT_STEP,
    step.sync_every_step,
    step.non_blocking_from_pageable,
    step.not_pinned,
    step.pinned_without_accelerator,
)
"""Causes about the step and about memory: they ask for a change, and do not explain why a loop waits for data."""

FAILURES: tuple[Cause, ...] = (
    failures.fails,
    failures.workers_hang,
    failures.stream_not_sharded,
    failures.constant_seed,
    failures.same_noise,
    failures.values_not_finite,
    failures.one_label,
)
"""Causes that end a program, or make all that it learns wrong."""

ABOUT_RESULTS: tuple[Cause, ...] = (
    training.gradients_not_cleared,
    training.left_out_of_optimizer,
    training.trains_in_evaluation_mode,
    training.loss_of_probabilities,
    training.loss_of_all_pairs,
    stored_data.changed_in_place,
    stored_data.labels_differ,
    sample_sets.in_train_and_validation,
    sample_sets.types_differ,
    sample_sets.images_not_scaled,
    sample_sets.samples_twice,
    epochs.cycled,
    epochs.same_order,
    epochs.not_shuffled,
    samples.float64_samples,
    memory.graphs_kept,
    memory.kept_by_the_program,
    memory.graphs_kept_of_epochs,
    memory.evaluation_keeps_graphs,
    memory.kept_by_the_dataset,
)
"""Causes that make a result wrong, or that fill the memory until a program ends, and no loop slow."""

CAUSES: tuple[Cause, ...] = (
    *FAILURES,
    *ABOUT_RESULTS,
    epochs.collected_first,
    epochs.iterator_recreated,
    processors.cpu_quota,
    processors.threads_beyond_cores,
    processors.threads_in_workers,
    worker_count.each_reads_all,
    worker_count.too_many_workers,
    epochs.short_epochs,
    epochs.other_loader_restarted,
    worker_count.one_lock,
    stored_data.tensors_as_keys,
    costly_parts.sampler_start_beyond_samples,
    *sample_lines.LINE_PATTERNS,
    sample_lines.read_again_for_each_sample,
    sample_lines.same_for_every_sample,
    sample_lines.threads_hold_each_other,
    samples.full_size_decode,
    worker_count.prefetches_little,
    samples.slow_samples,
    samples.cold_reads,
    sample_lines.reads_more_than_it_keeps,
    samples.python_numbers,
    samples.nested_datasets,
    costly_parts.costly_sampler_start,
    costly_parts.line_beyond_its_result,
    costly_parts.costly_sampler,
    costly_parts.unused_fields,
    costly_parts.costly_collate,
    worker_count.sends_many_tensors,
    samples.made_one_by_one,
    worker_count.workers_do_not_scale,
    worker_count.no_workers,
    worker_count.waiting_samples,
    costly_parts.costly_line,
    worker_count.workers_cost_more,
    *worker_count.BETTER_SETTINGS,
    processors.cpu_contention,
    *NOT_ABOUT_LOADING,
)
