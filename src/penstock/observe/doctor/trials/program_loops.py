"""The loops of an unmodified program: `iter(loader)` returns an iterator of the doctor's while a program runs.

It returns what the loader itself would return, until a training loop requests a batch; from then on the scheduler feeds
that loop. Loops over other loaders (a validation after every epoch) are then cut short, or they would take the time
that the trials need: where loading is free, an epoch is soon over. After the trials the program goes on for a moment,
to begin its next epochs; see `later_epochs`.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.probes.batch_values import copy_containers
from penstock.observe.doctor.trials.batch_source import iterate_unpatched
from penstock.observe.doctor.trials.loop_session import LoopSession
from penstock.observe.doctor.trials.other_loops import length_of
from penstock.observe.doctor.trials.trial_scheduler import TrialScheduler

_OTHER_LOOP_BATCHES = 2
"""What a loop that is not examined gets once such loops have taken their time; two, so that code after its first batch
runs as well."""
_TRAINS = 2
"""So many steps of optimizers in a loop tell that it trains, and that the one before it was a look."""


class _ProgramIterator:
    """What a program gets for `iter(loader)`: the loader's own batches, or the scheduler's."""

    def __init__(self, scheduler: TrialScheduler, loader: DataLoader[Any]) -> None:
        self._scheduler = scheduler
        self._loader = loader
        self._batches: Any = None
        """The loader's own iterator, where a batch is not the scheduler's."""
        self._fed_by: LoopSession | None = None
        """The session that has given the last batch."""
        self._later_batches = 0
        self._in_a_row = 0
        self._first_step = self._step = -1
        """The steps of the examined loop in which a batch was requested first, and last."""
        self._asked_at = 0.0
        self._steps_before = 0
        """How many steps optimizers had made when a batch was requested first in this step."""
        self._is_over = False

    def __iter__(self) -> _ProgramIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        scheduler = self._scheduler
        if self._is_over:
            raise StopIteration
        if threading.current_thread() is not threading.main_thread():
            return self._batch_of_a_thread()
        is_fed = self._fed_by is not None and self._fed_by is scheduler.session
        if scheduler.goes_on and not is_fed:
            return self._later_batch()
        if not is_fed:
            is_in_step = self._step == scheduler.batches_requested
            steps = scheduler.optimizers.steps - self._steps_before if is_in_step else 0
            scheduler.forget_a_look(trains_beside=steps >= _TRAINS)
        elif scheduler.is_untrained_pass(self._loader):
            self._is_over = True
            scheduler.forget()
            raise StopIteration
        if scheduler.loader is None and scheduler.accepts(training=torch.is_grad_enabled()):
            self._batches = None
            scheduler.evaluation_loaders.look_around()
            scheduler.is_cycled = any(isinstance(one, itertools.cycle) for one in gc.get_referrers(self))
            scheduler.begin_program(self._loader, self)
        if is_fed or scheduler.examines(self._loader, training=torch.is_grad_enabled()):
            if self._fed_by is not scheduler.session:
                self._fed_by = scheduler.session
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
        return self._batch_beside()

    def _batch_of_a_thread(self) -> Any:
        """Return a batch of the loader's own: loops are examined in the main thread, which signals can interrupt."""
        if self._scheduler.has_ended:
            raise SystemExit  # of which no thread gives a traceback
        if self._batches is None:
            self._batches = iterate_unpatched(self._loader)
        return next(self._batches)

    def _batch_beside(self) -> Any:
        """Return a batch for what a program does in the middle of the examined loop.

        What it takes from one iterator over several steps is part of the examined loop: unlabelled samples, or those of
        a second domain. An iterator that begins and goes on in one step is that of another loop, which is cut short.

        Raises:
            StopIteration: it is over.
        """
        scheduler, step = self._scheduler, self._scheduler.batches_requested
        self._in_a_row = self._in_a_row + 1 if self._step == step else 1
        if self._in_a_row == 1:
            self._steps_before = scheduler.optimizers.steps
        self._first_step = step if self._first_step < 0 else self._first_step
        self._step = step
        is_in_one_step = step == self._first_step
        before, self._asked_at = self._asked_at, time.perf_counter()
        is_other_loop = is_in_one_step and self._in_a_row > _OTHER_LOOP_BATCHES
        if is_other_loop and scheduler.cuts_short(self._loader, self._asked_at - before):
            raise StopIteration
        if self._batches is None:
            return self._first_batch()
        try:
            return next(self._batches)
        except StopIteration:
            if is_in_one_step or self._in_a_row > (length_of(self._loader) or 1):
                raise
            # The examined loop does not end with its epoch while it is examined, and so neither does what it takes.
            self._batches = iterate_unpatched(self._loader)
            return next(self._batches)

    def _later_batch(self) -> Any:
        """Return a batch while the program goes on after its trials: one of the examined loop, and two of others."""
        later = self._scheduler.later_epochs
        assert later is not None
        is_own = later.belongs(self._loader)
        if is_own and self._later_batches:
            later.note_step()
        self._later_batches += 1
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
        scheduler.has_ended = True
        DataLoader.__iter__ = iterate_unpatched  # type: ignore[method-assign]
