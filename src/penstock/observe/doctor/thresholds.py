"""The doctor's thresholds, in one table: each with its value, its unit and the reason for it.

`THRESHOLDS` is what the trials, the probes and the causes read. `threshold_table` returns the same as rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

_Value = TypeVar("_Value", int, float)


def _threshold(value: _Value, unit: str, reason: str) -> _Value:
    return field(default=value, metadata={"unit": unit, "reason": reason})


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Every number with which the doctor decides something; `reason` says what goes wrong without it."""

    # ── is loading worth a change? ──────────────────────────────────────────────────────────────────────────

    stall_fraction: float = _threshold(
        0.15, "of the loop's time", "a loop that waits less has little to gain: at most 1 / (1 - 0.15) = 1.18 times"
    )
    certain_stall_fraction: float = _threshold(
        0.3, "of the loop's time", "a wait this long counts even if one round with free loading was no faster"
    )
    worthwhile_gain: float = _threshold(
        1.1, "times as fast", "below it a change is not worth the user's time, and noise between rounds is as large"
    )
    agreeing_rounds: float = _threshold(
        1.3, "times as fast", "the fastest round of a trial beside its slowest one; otherwise the gain is not known"
    )
    step_slowdown: float = _threshold(
        1.5, "times as long", "what slows a step this much, its workers or its own growth, is worth a change"
    )
    quick_batch_s: float = _threshold(
        0.004,
        "s per batch",
        "a loader without a step that is faster than this is called healthy: few steps are shorter",
    )

    # ── workers ─────────────────────────────────────────────────────────────────────────────────────────────

    busy_workers: float = _threshold(
        0.7, "of the workers' time", "workers that make samples for less wait for the loop, or carry batches to it"
    )
    hung_fraction: float = _threshold(0.95, "of the loop's time", "a loop that waits for less still gets batches")
    throttled_fraction: float = _threshold(
        0.05, "of the measured time", "a cgroup that throttles less than this hardly delays the loop"
    )
    contending_worker_cores: float = _threshold(
        1.3, "cores per worker", "threads under the GIL use or want one core together; only native threads want more"
    )
    certain_contending_threads: float = _threshold(
        4.0, "busy threads per worker", "this many are a native thread pool, even if no core is left to run them"
    )
    threads_per_core: float = _threshold(
        1.9, "threads of torch per core", "a machine with two hardware threads per core may count either of them"
    )
    workers_per_core: float = _threshold(1.5, "workers per core", "some workers wait for storage while others compute")
    tried_workers_per_core: float = _threshold(
        2.0, "workers per core", "with more than this, two more workers are not tried"
    )
    fewer_workers_keep: float = _threshold(
        0.95, "times as fast", "fewer workers are recommended if they are not slower than this"
    )
    busy_fraction: float = _threshold(
        0.3, "of the cores", "with more of them used by others, workers get their share by number and not by need"
    )
    hidden_loading: float = _threshold(
        0.7, "times the step", "workers hide loading that needs less; the rest is a margin for slow batches"
    )
    unhidden_loading: float = _threshold(
        2.0, "times the step", "where loading free was not tried, a loop cannot hide what takes this much longer"
    )
    inline_batch_s: float = _threshold(
        0.003, "s per batch", "transporting a batch from a worker costs up to this, so a cheaper one needs no worker"
    )
    small_batch_nbytes: int = _threshold(
        4 << 20, "bytes", "for larger batches the copy is the cost, and not the message"
    )
    repeated_work: float = _threshold(
        0.6, "of a batch's time, for each worker", "workers that all make the whole stream take one for each"
    )
    least_repeated_work: float = _threshold(
        1.6, "times a batch's time", "workers that share cores and caches with each other and the step take longer, too"
    )
    serial_factor: float = _threshold(
        2.0, "times as long", "workers that wait side by side lose less to the machine; those that take turns lose more"
    )
    asleep_fraction: float = _threshold(
        0.4, "of a worker's time", "of two workers that share a lock each sleeps for half, while the other one has it"
    )
    # ── epochs and iterators ────────────────────────────────────────────────────────────────────────────────

    few_iterators: int = _threshold(
        2, "iterators", "a program that made no more than this may have looked at one batch first"
    )
    batches_per_iterator: int = _threshold(
        2, "batches", "a loop that takes no more from an iterator pays the workers' start for almost every batch"
    )
    startup_fraction: float = _threshold(
        0.25, "of an epoch's time", "starting workers is worth a change if it takes more of the epoch"
    )
    sampler_start_s: float = _threshold(
        0.01, "s", "a shuffle of torch's takes less, for a hundred thousand samples; a good part of a tiny epoch"
    )
    shuffled_samples: int = _threshold(8, "samples per epoch", "8 have the same order twice by chance once in 40 320")
    one_label_samples: int = _threshold(
        64, "samples", "of two equally frequent classes, one is missing by chance once in 1e19"
    )
    other_startup_fraction: float = _threshold(
        0.1, "of the loop's time between two starts", "short starts matter as well where they are frequent"
    )
    other_starts: int = _threshold(2, "starts", "a loop that was started once shows no repetition")
    other_startup_s: float = _threshold(0.05, "s", "a start that takes less is not worth a change, once per validation")

    # ── samples ─────────────────────────────────────────────────────────────────────────────────────────────

    shrunk_pixel_ratio: float = _threshold(
        4.0, "pixels decoded per pixel kept", "a JPEG decoder halves width and height at least: 2 x 2 pixels"
    )
    reduced_decode_saving: float = _threshold(
        0.1, "of the full decode", "a reduced decode that saves less is within the noise of timing one file"
    )
    slow_sample: float = _threshold(5.0, "times the median", "what random crops or file sizes explain is less")
    slow_time_fraction: float = _threshold(
        0.25, "of all samples' time", "slow samples that take less together do not decide the loader's speed"
    )
    slow_sample_fraction: float = _threshold(
        0.35, "of the samples", "with more than this they are not exceptions, and the median says little"
    )
    disk_fraction: float = _threshold(0.3, "of the bytes read", "with less, the page cache serves most reads")
    disk_nbytes: int = _threshold(1 << 20, "bytes", "importing a module during the measurement reads less than this")
    major_faults_per_sample: float = _threshold(
        0.5, "faults per sample", "memory-mapped data that is not in the page cache faults once per sample or more"
    )
    python_numbers: int = _threshold(
        32, "numbers per sample", "default_collate makes a tensor for each position; a few labels are harmless"
    )
    float64_fraction: float = _threshold(0.5, "of a batch's bytes", "with less, halving them saves under a quarter")
    double_sample_nbytes: int = _threshold(
        512, "bytes of a sample", "a target of a few numbers costs nothing in any type"
    )
    large_batch_nbytes: int = _threshold(
        1 << 20, "bytes", "moving a smaller batch costs messages, and not bytes: a smaller type does not help"
    )
    moving_fraction: float = _threshold(
        0.3, "of loading", "collate and transport have to take this much before a smaller type pays"
    )

    part_fraction: float = _threshold(0.2, "of a sample's time", "what takes less is not what makes a sample slow")
    wasted_fraction: float = _threshold(
        0.2,
        "of a sample's or step's time",
        "a log, or a round trip to a Manager, can be left out whole, where real work can only be made faster",
    )
    most_fraction: float = _threshold(
        0.6, "of a sample's or batch's time", "what no pattern explains is named only where it is most of the cost"
    )
    line_fraction: float = _threshold(
        0.4, "of a sample's or step's time", "a line that takes less is not what decides how long it takes"
    )
    costly_sample_s: float = _threshold(
        1e-4, "s per sample", "cheaper samples cost what Python takes for any call, in whichever line that is"
    )
    one_by_one_s: float = _threshold(
        0.006, "s per batch", "cheap samples whose batch takes less gain as much from fewer workers, or larger batches"
    )
    repeated_samples: int = _threshold(5, "samples", "a file that fewer of them read may be theirs by chance")
    repeated_fraction: float = _threshold(
        0.9, "of the samples", "what nearly all read does not depend on the sample, but for a shard of many samples"
    )
    many_reads: float = _threshold(
        16, "values read in a step", "on a processor fewer take microseconds; more are worth a change there, too"
    )
    unknown_length: int = _threshold(1000, "batches", "of an epoch whose length nobody knows: a stream's is long")
    kept_epoch_nbytes: int = _threshold(
        512 << 20, "bytes in an epoch", "the outputs of an epoch that are kept for its metric are mostly less"
    )
    seen_steps: int = _threshold(32, "steps", "what is trained in turns may wait for as many")
    untrained_fraction: float = _threshold(
        0.5, "of the parameters", "beyond it, a head is trained on a backbone that is not to be"
    )
    growth_windows: int = _threshold(4, "windows", "in fewer, steps seem to grow by chance")
    growth_half_way: float = _threshold(
        0.1, "of the growth", "steps that grow have grown, half-way: a jump is another program that began"
    )
    growth_pairs: float = _threshold(0.9, "of the pairs of windows", "of 5 windows in any order, one in 24 has so many")
    line_turns: float = _threshold(0.5, "of the steps", "a line that is seen in fewer is not what every step does")
    estimated_fraction: float = _threshold(
        0.9,
        "of a sample's or step's time",
        "beyond, what is left is within the error of looking every few milliseconds",
    )

    noise_chance: float = _threshold(
        0.01, "probability", "two workers that both flip an image with equal chance agree in every second sample"
    )
    whole_image: float = _threshold(
        64.0, "largest value of an image", "whole numbers up to this may be classes, depths or counts"
    )

    # ── memory of workers ───────────────────────────────────────────────────────────────────────────────────

    many_objects: int = _threshold(
        20_000, "Python objects", "about 1 MiB of small objects: fewer cannot cost a worker much"
    )
    worker_growth_nbytes: int = _threshold(
        2 << 20, "bytes", "allocator arenas of a new worker grow by up to about this without any copy"
    )
    worker_growth_per_sample_nbytes: int = _threshold(
        1024, "bytes per sample", "a quarter of a page: what is copied on write grows by pages"
    )
    usual_prefetch_factor: int = _threshold(
        8, "batches per worker", "fewer hide any loader whose samples take about equally long"
    )
    prefetched_nbytes: int = _threshold(
        512 << 20, "bytes", "batches that are made ahead and take less are nobody's problem"
    )
    shm_fraction: float = _threshold(
        0.5, "of the free /dev/shm", "batch sizes vary and other programs use /dev/shm, too; full, it kills workers"
    )

    # ── finished runs ───────────────────────────────────────────────────────────────────────────────────────

    run_stall_fraction: float = _threshold(
        0.1, "of the loop's time", "a whole run is a longer measurement than a trial, so less is significant"
    )
    run_estimate_stall: float = _threshold(
        0.9,
        "of the loop's time",
        "beyond it an estimate is the quotient of the loop and a step that takes about nothing",
    )
    run_wait_s: float = _threshold(1.0, "s", "nobody changes a script for less")
    run_wait_fraction: float = _threshold(
        0.25, "of the loop's time", "in a run of a few seconds this stands in for the absolute wait"
    )
    run_growth_nbytes: int = _threshold(256 << 20, "bytes", "caches of Python, torch and the allocator grow by less")
    run_growth_fraction: float = _threshold(
        0.2, "of the earlier memory", "for large programs, the same limit relative to their size"
    )
    run_growth_points: int = _threshold(9, "points of the timeline", "three per third; with fewer one outlier decides")

    # ── the trials' schedule ────────────────────────────────────────────────────────────────────────────────

    warm_up_batches: int = _threshold(3, "batches", "the first ones compile, allocate and fill caches")
    observed_steps: int = _threshold(3, "steps", "a call that all of these make is made in every step")
    line_looks: int = _threshold(
        100, "looks", "a line that takes half of a step is seen in 40 to 60 of so many; looks are 3 ms apart"
    )
    window_batches: int = _threshold(
        4, "batches of its own", "beyond those that may have been made ahead; a mean of fewer says little"
    )
    window_s: float = _threshold(0.12, "s", "shorter timing windows measure the scheduler of the operating system")
    windows_per_source: int = _threshold(5, "windows", "the time is divided so that each source gets about this many")
    hopeless_gain: float = _threshold(
        1.03, "times as fast with loading free", "nothing beats free loading: below this, no other trial continues"
    )
    no_gradient_loop_s: float = _threshold(
        3.0, "s", "a loop without gradients that lasts longer (or 0.3 of the time) is what the program is about"
    )
    start_deadline_fraction: float = _threshold(
        0.5, "of the trials' time", "sources whose workers start later leave no time to compare them"
    )
    cut_window_batches: int = _threshold(
        8, "batches", "a window that a validation interrupts is kept if it has this many"
    )
    blocked_source_s: float = _threshold(
        0.5, "s", "a source that waits longer than this (and 3 times its longest wait) may need a paused one's lock"
    )
    overrun: float = _threshold(1.1, "times the trials' time", "what the loop may take before it is ended by a signal")
    overrun_s: float = _threshold(0.5, "s", "added to it, for short --seconds")
    first_batch: float = _threshold(2.0, "times the trials' time", "what the loop may take for its first batch")
    first_batch_s: float = _threshold(15.0, "s", "the same for short --seconds: workers import torch, and read")
    left_after_start: float = _threshold(
        0.6, "of the trials' time", "left for the trials however long the loop's first batch took: the probes get less"
    )

    # ── probes ──────────────────────────────────────────────────────────────────────────────────────────────

    busy_thread: float = _threshold(
        0.3, "of the busiest thread's ticks", "a thread with less only waits for the busiest one"
    )
    worker_ticks: int = _threshold(10, "clock ticks", "a worker that ran for less (0.1 s) cannot be judged")
    hotspot_fraction: float = _threshold(0.1, "of the dataset's time", "functions below it are not worth a line")


THRESHOLDS = Thresholds()


def threshold_table() -> list[tuple[str, float, str, str]]:
    """Return name, value, unit and reason of every threshold.

    >>> next(row for row in threshold_table() if row[0] == "python_numbers")[:3]
    ('python_numbers', 32, 'numbers per sample')
    """
    return [
        (one.name, getattr(THRESHOLDS, one.name), one.metadata["unit"], one.metadata["reason"])
        for one in fields(THRESHOLDS)
    ]
