"""The loops of an unmodified program: `iter(loader)` returns an iterator of the doctor's while a program runs.

It returns what the loader itself would return, until a training loop requests a batch; from then on the scheduler feeds
that loop. Loops over other loaders (a validation after every epoch) are then cut short, or they would take the time
that the trials need: where loading is free, an epoch is soon over. After the trials the program goes on for a moment,
to begin its next epochs; see `later_epochs`.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.batch_values import copy_containers
from penstock.observe.doctor.trials.batch_source import iterate_unpatched
from penstock.observe.doctor.trials.collected_epochs import check_collects
from penstock.observe.doctor.trials.loop_frames import is_in_a_loop, is_in_for, is_single_look
from penstock.observe.doctor.trials.other_loops import length_of
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler

_OTHER_LOOP_BATCHES = 2
"""What a loop that is not examined gets; two, so that code after its first batch runs as well ..."""
_WHOLE_LOOP_S = 1.0
"""... and the first time what it asks for in so long, which may be less than its loader has."""


class _ProgramIterator:
    """What a program gets for `iter(loader)`: the loader's own batches, or the scheduler's."""

    def __init__(self, scheduler: TrialScheduler, loader: DataLoader[Any]) -> None:
        self._scheduler = scheduler
        self._loader = loader
        self._batches: Any = None
        self._later_batches = 0
        self._in_a_row = 0
        self._step = -1
        """The step of the examined loop in which a batch was requested last."""
        self._began: proc.ThreadTimes | None = None
        self._is_over = False
        self._requested_at: float | None = None

    def __iter__(self) -> _ProgramIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        scheduler = self._scheduler
        if self._is_over:
            raise StopIteration
        if scheduler.ends_thread:
            scheduler.close()  # in the thread that is watched
            raise SystemExit  # of which no thread gives a traceback, even after Ctrl-C has ended the program
        if scheduler.goes_on and self._batches is not scheduler:
            return self._later_batch()
        if self._batches is not scheduler:
            scheduler.forget_a_look()
        if scheduler.loader is None and self._is_examined(sys._getframe(1)):
            self._batches = None
            check_collects(self._loader, sys._getframe(1))
            scheduler.evaluation_loaders.look_around()
            scheduler.is_cycled = any(isinstance(one, itertools.cycle) for one in gc.get_referrers(self))
            scheduler.begin_program(self._loader, self, is_repeated=is_in_a_loop(sys._getframe(1)))
        if self._batches is scheduler or scheduler.examines(self._loader, training=torch.is_grad_enabled()):
            if self._batches is None:
                self._batches = scheduler
                scheduler.iterators_created += 1
            scheduler.batches_requested += 1
            try:
                return next(scheduler)
            except StopIteration:
                self._is_over = True
                raise
        scheduler.evaluation_loaders.note_request(self._loader, has_gradients=torch.is_grad_enabled())
        if scheduler.loader is None:
            return self._first_batch() if self._batches is None else next(self._batches)
        return self._batch_beside(is_in_for=is_in_for(sys._getframe(1)))

    def _batch_beside(self, *, is_in_for: bool) -> Any:
        """Return a batch for what a program does in the middle of the examined loop.

        One batch in each of its steps, and what `next` takes, are part of the examined loop: of unlabelled samples, or
        of a second domain. Another loop is cut short.

        Raises:
            StopIteration: it is over.
        """
        scheduler = self._scheduler
        self._in_a_row = self._in_a_row + 1 if self._step == scheduler.batches_requested else 1
        self._step = scheduler.batches_requested
        if is_in_for and self._in_a_row > 1:
            self._cut_short()
        if self._batches is None:
            return self._first_batch()
        try:
            return next(self._batches)
        except StopIteration:
            if is_in_for or self._in_a_row > (length_of(self._loader) or 1):
                raise
            # The examined loop does not end with its epoch while it is examined, and so neither does what it takes.
            self._batches = iterate_unpatched(self._loader)
            return next(self._batches)

    def _cut_short(self) -> None:
        scheduler, passes = self._scheduler, self._scheduler.repeated_passes
        if scheduler.session is not None:
            scheduler.session.interrupt()
        if self._began is None:
            passes.note_pass(self._loader, scheduler.batches_requested)
            self._began = proc.thread_times()
            return
        spent = proc.thread_times_since(self._began)
        passes.note_batches(self._loader, self._in_a_row, spent.busy_s / (self._in_a_row - _OTHER_LOOP_BATCHES))
        if passes.is_known(self._loader) or spent.wall_s > _WHOLE_LOOP_S:
            passes.note_cut(self._loader)
            scheduler.note_cut(type(self._loader.dataset).__name__)
            raise StopIteration

    def _later_batch(self) -> Any:
        """Return a batch while the program goes on after its trials: one of the examined loop, and two of others."""
        later = self._scheduler.later_epochs
        assert later is not None
        is_own = later.belongs(self._loader)
        if is_own and self._later_batches:
            later.note_step()
        self._later_batches += is_own or is_in_for(sys._getframe(2))
        if self._later_batches > (1 if is_own else _OTHER_LOOP_BATCHES):
            raise StopIteration
        with later.guard.suspended():
            if is_own:
                later.add(self._loader)
                return copy_containers(self._scheduler.session.batch if self._scheduler.session is not None else None)
            later.has_others = True
            if self._batches is None:
                return self._first_batch(later.epoch_length)
            return next(self._batches)

    def _first_batch(self, batches_between: float = 0.0) -> Any:
        began = time.perf_counter()
        self._batches = iterate_unpatched(self._loader)
        batch = next(self._batches)
        self._scheduler.other_loops.note_start(self._loader, time.perf_counter() - began, batches_between)
        return batch

    def _is_examined(self, frame: FrameType) -> bool:
        now = time.perf_counter()
        self._scheduler.passive_s += 0.0 if self._requested_at is None else now - self._requested_at
        self._requested_at = now
        if is_single_look(frame):
            return False
        return self._scheduler.accepts(training=torch.is_grad_enabled(), frame=frame)


@contextmanager
def patch_iteration(scheduler: TrialScheduler) -> Iterator[None]:
    """Let `scheduler` feed the first training loop over any DataLoader, torch's or one derived from it."""

    def iterate(loader: DataLoader[Any]) -> Any:
        return _ProgramIterator(scheduler, loader)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        with scheduler.optimizers.patched():
            yield
    finally:
        scheduler.end_thread()
        DataLoader.__iter__ = iterate_unpatched  # type: ignore[method-assign]
