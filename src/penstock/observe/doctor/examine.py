"""Measures one loop from beginning to end, in about the time that is given.

First come the trials of the whole loop; then, in this process, its parts: a forked worker's memory, samples one by one,
collate, transport. Trials come first because workers that are forked inherit every file that the dataset has opened in
this process, so they are started before anything has been read here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.core.errors import PenstockError
from penstock.observe.doctor.contents.compare_loaders import compare_loaders, listed_twice
from penstock.observe.doctor.loader_probes import measure_parts
from penstock.observe.doctor.measurement_log import MeasurementLog, describe_error
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probes.machine_limits import CGROUP, MachineLimits
from penstock.observe.doctor.probes.time_limit import time_limit
from penstock.observe.doctor.trials.batch_source import impatient_close
from penstock.observe.doctor.trials.examined_loop import run_loop
from penstock.observe.doctor.trials.time_budget import TrialsDoneError
from penstock.observe.doctor.trials.trial_plan import plan_sources, read_settings
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler

_TRIALS = 0.55
"""Of the time, what the trials get; the probes share what they leave."""

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
    say: Callable[[str], None] = lambda text: None,
    cgroup: Path = CGROUP,
) -> Measurements:
    """Measure a loop or a loader.

    Args:
        loop: a DataLoader, a pair (loader, step), or a function (see `penstock.observe.doctor.trials.examined_loop`).
        name: its name in the report.
        seconds: about how long to take, from the beginning of the loop on: what the program does before is not
            counted. A call into C that never returns to Python cannot be cut short.
        on_error: is called with the exception that ended the loop early, if it has.
        say: is called with a line of text whenever something new begins.
        cgroup: where the kernel shows this process's control group.

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
    limits, log = MachineLimits(cgroup), MeasurementLog()

    def plan(loader: DataLoader[Any], has_step: bool) -> Any:
        return plan_sources(loader, limits.measure(), has_step=has_step)

    scheduler = TrialScheduler(plan, seconds * _TRIALS, say=say, one_thread=limits.measure().is_crowded)
    error = _run_trials(loop, scheduler, seconds * _TRIALS, log, on_error or (lambda raised: None))
    session, loader = scheduler.session, scheduler.loader
    if session is None or loader is None:
        raise PenstockError(_why_no_loop(scheduler, error))
    trials = session.trials()
    settings = read_settings(loader)
    left_s = max(_LEAST_PROBES * seconds, seconds - (time.perf_counter() - scheduler.began_at))
    log.limit(left_s)
    parts: dict[str, Any] = {}
    if session.batch is not None:  # a loader that gave none may block this process, too
        say(f"samples, collate and transport one by one, for {left_s:.0f} s")
        with impatient_close():
            parts = measure_parts(loader, settings, session.batch, left_s, log)
    evaluations = scheduler.evaluation_loaders.evaluations(loader)
    later = scheduler.later_epochs
    return Measurements(
        name=name or type(loader.dataset).__name__,
        machine=limits.measure(),
        settings=settings,
        has_step=scheduler.has_step,
        trials=trials,
        stream_repeats=session.comparison.repeats,
        epoch_orders=later.result() if later is not None else None,
        one_label=session.labels.result(),
        shared_samples=log.attempt("what is evaluated", lambda: compare_loaders(loader, evaluations), 2.0) or (),
        listed_twice=log.attempt("what is drawn", lambda: listed_twice(loader), 1.0) or 0,
        evaluates_later=later is not None and later.evaluates,
        iterators_created=scheduler.iterators_created,
        loaders_created=scheduler.loaders_created,
        is_cycled=scheduler.is_cycled,
        other_loops=scheduler.other_loops.results(),
        batches_requested=scheduler.batches_requested,
        worker_activity=session.activity.result(),
        step_calls=session.step_calls.result() if scheduler.has_step else None,
        kept_tensors=session.kept,
        step_lines=session.lines.lines_of_program() if scheduler.has_step else (),
        called_lines=session.lines.lines_of_program(called=True),
        error=error,
        wall_s=time.perf_counter() - began,
        preparing_s=scheduler.began_at - began,
        notes=log.notes,
        **parts,
    )


def _why_no_loop(scheduler: TrialScheduler, error: str) -> str:
    if scheduler.optimizers.steps and not error:
        return (
            f"the program trains without a DataLoader ({scheduler.optimizers.steps} steps of its optimizers), in "
            "another thread, or with batches that it has collected before: there is no loading to examine; `penstock "
            "doctor --pid N` shows the lines of a program that runs"
        )
    return f"the function ended before its loop began ({error or 'it took too long'}); fix it, or give more --seconds"


def _run_trials(
    loop: Any, scheduler: TrialScheduler, seconds: float, log: MeasurementLog, on_error: Callable[[Exception], None]
) -> str:
    """Run the loop until all trials are over; return the exception that ended it early, in one line."""
    error, has_gradients = "", torch.is_grad_enabled()
    try:
        with time_limit(_PREPARING_S, TrialsDoneError, scheduler.tick):
            run_loop(loop, scheduler)
    except TrialsDoneError:
        if scheduler.session is not None and not any(trial.windows for trial in scheduler.session.trials()):
            log.add(
                f"the loop: its first batches took longer than {seconds:.0f} s; give more --seconds, or run it and see "
                "where its workers are: penstock doctor --pid N"
            )
    except Exception as raised:
        # After the trials, a program gets fewer batches than it may need.
        if not scheduler.goes_on:
            if isinstance(raised, PenstockError):
                raise
            error = describe_error(raised)
            if not isinstance(raised.__cause__, SystemExit):
                on_error(raised)
    finally:
        torch.set_grad_enabled(has_gradients)  # the loop may have been ended in the very exit of a no_grad()
        with contextlib.suppress(TrialsDoneError), time_limit(_CLOSING_S, TrialsDoneError), impatient_close():
            scheduler.close()
    return error
