"""Measures one loop from beginning to end, in about the time that is given.

First come the trials of the whole loop; then, in this process, its parts: a forked worker's memory, the dataset's
pickle, samples one by one, collate, transport, threads. Trials come first because workers that are forked inherit every
file that the dataset has opened in this process, so they are started before anything has been read here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from penstock.core.errors import PenstockError
from penstock.observe.doctor.content_results import SingleSamples
from penstock.observe.doctor.contents.compare_loaders import Comparison, compare_loaders
from penstock.observe.doctor.contents.content_reader import ContentReader
from penstock.observe.doctor.contents.label_numbers import compare_label_numbers
from penstock.observe.doctor.contents.single_samples import find_single_samples
from penstock.observe.doctor.loader_probes import LoaderProbes
from penstock.observe.doctor.measurement_log import MeasurementLog, describe_error
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes.machine_limits import CGROUP, SHM, MachineLimits
from penstock.observe.doctor.probes.time_limit import time_limit
from penstock.observe.doctor.trials.batch_source import impatient_close
from penstock.observe.doctor.trials.examined_loop import run_loop
from penstock.observe.doctor.trials.loop_without_loader import LoopWithoutLoader
from penstock.observe.doctor.trials.time_budget import TrialsDoneError
from penstock.observe.doctor.trials.trial_plan import plan_sources, read_settings
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler

_TRIALS = 0.55
"""Of the time, what the trials get; the probes share what they leave."""

_CONTENTS, _LEAST_CONTENTS_S = 0.12, 0.6
"""Of the probes' time, what comparing samples gets; it comes last, and no timed measurement waits for it."""

_SINGLE_S = 0.5
"""What making a few samples of an evaluation may take."""

_LEAST_PROBES = 0.25
"""Of the time, what the probes get however long the trials took."""

_PREPARING_S = 600.0
"""What a program may take before its loop begins; the trials' own limit counts from there."""

_CLOSING_S = 4.0
"""What the workers of all sources may take to stop."""


def examine(
    loop: Any,
    *,
    name: str = "",
    seconds: float = 20.0,
    on_error: Callable[[Exception], None] | None = None,
    cgroup: Path = CGROUP,
    shm: Path = SHM,
) -> Measurements:
    """Measure a loop or a loader.

    Args:
        loop: a DataLoader, a pair (loader, step), or a function (see `penstock.observe.doctor.trials.examined_loop`).
        name: its name in the report.
        seconds: about how long to take, from the beginning of the loop on: what the program does before is not
            counted. A call into C that never returns to Python cannot be cut short.
        on_error: is called with the exception that ended the loop early, if it has.
        cgroup: where the kernel shows this process's control group.
        shm: where torch's workers put their batches.

    Raises:
        OptionError: `loop` is none of these.
        PenstockError: the function ended before it looped over a DataLoader.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(torch.arange(64.0), batch_size=8)
        >>> measured = examine((loader, lambda batch: batch.sum()), seconds=1.0)
        >>> measured.as_is is not None, measured.settings.num_workers
        (True, 0)
    """
    began = time.perf_counter()
    limits, log = MachineLimits(cgroup, shm), MeasurementLog()

    def plan(loader: DataLoader[Any], has_step: bool) -> Any:
        return plan_sources(loader, limits.measure(), has_step=has_step)

    scheduler = TrialScheduler(plan, seconds * _TRIALS)
    error = _run_trials(loop, scheduler, seconds * _TRIALS, log, on_error or (lambda raised: None))
    loader = scheduler.loader
    if loader is None and scheduler.without_loader.began_at is not None:
        return _of_steps(scheduler.without_loader, name, limits.measure(), error, began, log.notes)
    if loader is None:
        raise PenstockError(
            f"the function ended before its loop began ({error or 'it took too long'}); fix it, or give more --seconds"
        )
    trials = scheduler.trials()
    step_calls = scheduler.step_calls.result() if scheduler.has_step else None
    settings = read_settings(loader)
    left_s = max(_LEAST_PROBES * seconds, seconds - (time.perf_counter() - scheduler.began_at))
    log.limit(left_s)
    # Workers that hang show what is wrong; their dataset may block this process, too.
    with impatient_close():
        parts = LoaderProbes(loader, settings, left_s, log).measure(scheduler.batch) if scheduler.hang is None else {}
        compared = _compare(scheduler, left_s, log) if scheduler.hang is None else Comparison()
        single = _find_single_samples(scheduler, log) if scheduler.hang is None else None
    label_numbers = log.attempt(
        "the numbers of labels",
        lambda: compare_label_numbers(loader, scheduler.evaluation_loaders.evaluations(loader)),
        1.0,
    )
    return Measurements(
        name=name or type(loader.dataset).__name__,
        machine=limits.measure(),
        settings=settings,
        has_step=scheduler.has_step,
        trials=trials,
        stream_repeats=scheduler.stream_repeats,
        epoch_orders=scheduler.epoch_orders,
        one_label=scheduler.one_label,
        **{one.name: getattr(compared, one.name) for one in fields(compared)},
        single_samples=single,
        module_hooks=scheduler.module_hooks,
        evaluates_later=scheduler.evaluates_later,
        memory_growth=scheduler.memory_growth,
        graphs_of_epochs=scheduler.graphs_of_epochs,
        evaluation_graph=scheduler.evaluation_graphs.result(),
        saved_storages=scheduler.saved_storages,
        label_numbers=label_numbers,
        iterators_created=scheduler.iterators_created,
        loaders_created=scheduler.loaders_created,
        is_cycled=scheduler.is_cycled,
        collected_at=scheduler.collected_at,
        collects_again=scheduler.collects_again,
        other_loops=scheduler.other_loops.results(),
        repeated_passes=scheduler.repeated_passes.results(),
        batches_requested=scheduler.batches_requested,
        worker_activity=scheduler.activity.result(),
        step_calls=step_calls,
        step_lines=scheduler.step_lines,
        step_statements=scheduler.step_statements,
        called_lines=scheduler.called_lines,
        constant_lines=scheduler.constant_lines,
        hang=scheduler.hang,
        error=error,
        wall_s=time.perf_counter() - began,
        preparing_s=scheduler.began_at - began,
        notes=log.notes,
        **parts,
    )


def _of_steps(
    loop: LoopWithoutLoader, name: str, machine: Machine, error: str, began: float, notes: tuple[str, ...]
) -> Measurements:
    """Return what is known of a program that makes its batches by itself."""
    constant = loop.step_calls.constant_lines
    part = loop.step_lines.part_of_program(constant.lines())
    return Measurements(
        name=name or "the program",
        machine=machine,
        settings=Settings(dataset="", kind=""),
        has_step=True,
        trials=(loop.trial(),),
        step_calls=loop.step_calls.result(),
        step_lines=loop.step_lines.lines_of_program(),
        constant_lines=replace(part, fraction=max(part.fraction, constant.fraction())) if part is not None else None,
        memory_growth=loop.memory_growth,
        error=error,
        wall_s=time.perf_counter() - began,
        preparing_s=(loop.began_at or began) - began,
        notes=notes,
    )


def _compare(scheduler: TrialScheduler, left_s: float, log: MeasurementLog) -> Comparison:
    """Compare the samples of the examined loop with each other, and with those that the program evaluates."""
    loader, seconds = scheduler.loader, max(_LEAST_CONTENTS_S, left_s * _CONTENTS)
    assert loader is not None
    evaluations = scheduler.evaluation_loaders.evaluations(loader)
    compared = log.attempt(
        "what samples hold",
        lambda: compare_loaders(loader, evaluations, ContentReader(seconds)),
        seconds,
        least_s=seconds + 1.0,  # it ends by itself, with what it has read, unless one sample takes very long
    )
    return compared or Comparison()


def _find_single_samples(scheduler: TrialScheduler, log: MeasurementLog) -> SingleSamples | None:
    loader = scheduler.loader
    assert loader is not None
    evaluations = scheduler.evaluation_loaders.evaluations(loader)
    return log.attempt(
        "evaluations of single samples",
        lambda: find_single_samples(loader, evaluations, scheduler.single_costs),
        _SINGLE_S,
    )


def _run_trials(
    loop: Any, scheduler: TrialScheduler, seconds: float, log: MeasurementLog, on_error: Callable[[Exception], None]
) -> str:
    """Run the loop until all trials are over; return the exception that ended it early, in one line."""
    error = ""
    try:
        with time_limit(_PREPARING_S, TrialsDoneError, scheduler.tick):
            run_loop(loop, scheduler)
    except TrialsDoneError:
        if scheduler.without_loader.began_at is None and not any(trial.windows for trial in scheduler.trials()):
            log.add(f"the loop: its first batches took longer than {seconds:.0f} s; give more --seconds")
    except Exception as raised:
        # After the trials, a program gets fewer batches than it may need.
        if not scheduler.goes_on:
            if isinstance(raised, PenstockError):
                raise
            error = describe_error(raised)
            if not isinstance(raised.__cause__, SystemExit):
                on_error(raised)
    finally:
        with contextlib.suppress(TrialsDoneError), time_limit(_CLOSING_S, TrialsDoneError), impatient_close():
            scheduler.close()
    return error
