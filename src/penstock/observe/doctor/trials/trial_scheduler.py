"""The trial scheduler: feeds a loop, as written, from several sources that alternate, so that they can be compared.

A loop over a loader requests a batch, works on it, and requests the next. The scheduler answers the requests. First it
feeds the loop as its own loader would, then in short windows: as is, the same batch repeated, another loader. So
what is measured is the user's own loop, whatever it does, and every "what if" is a trial of that loop.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.epochs.later_epochs import LaterEpochs
from penstock.observe.doctor.trials.evaluation_loaders import EvaluationLoaders
from penstock.observe.doctor.trials.loop_session import LoopSession
from penstock.observe.doctor.trials.optimizer_watch import OptimizerWatch
from penstock.observe.doctor.trials.other_loops import OtherLoops, length_of
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError

_NO_GRADIENT_LOOP_S = 3.0
"""Seconds: a loop without gradients that lasts longer (or 0.3 of the time) is what the program is about."""

_LOOK_BATCHES, _MOST_LOOKS = 10, 2
"""A loop that is left after so few batches, and in which no optimizer made a step, was a look at some of them; the next
ones like it are what the program does."""

_PASSIVE_GAP_S = 1.0
"""The most that counts of the time between two batches of loops that are not examined: the rest is other work."""

_OTHER_LOOPS_S = 1.0
"""What loops beside the examined one may take in all before they are cut short, and see their ends until then."""


class TrialScheduler:
    """Waits for the loop to examine, then feeds it, as its iterator.

    Args:
        plan: returns the sources for a loader and whether there is a step; the first source is the loop's own loader.
        seconds: how long the trials may take.
        clock: seconds, monotonic.
        say: is called with a line of text where something new begins.
        one_thread: see `LoopSession`.
    """

    def __init__(
        self,
        plan: Callable[[DataLoader[Any], bool], Sequence[BatchSource]],
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda text: None,
        *,
        one_thread: bool = False,
    ) -> None:
        self._plan = plan
        self._seconds = seconds
        self._clock = clock
        self._say = say
        self._one_thread = one_thread
        self._created_at = clock()
        self.has_step = True
        self._has_cut = False
        self.optimizers = OptimizerWatch()
        self._looks = 0
        self.has_looped = False
        """Whether the program has requested a batch of any loader."""
        self.has_ended = False
        """Whether the program is no longer examined: a thread of it that loops ends with its next batch."""
        self.reset()

    def reset(self) -> None:
        """Forget the loop that was examined: another one is to be."""
        self._passive_at: float | None = None
        """When a loop that is not examined, or is no longer, requested its last batch."""
        if hasattr(self, "session"):
            self._passive_at = self._clock()  # before the session goes: a signal may ask for it in between
            self.close()
        self.began_at = self._created_at
        """When the examined loop requested its first batch; before that, when the scheduler was made."""
        self.session: LoopSession | None = None
        self.later_epochs: LaterEpochs | None = None
        """Of a program, once it has begun its first epoch."""
        self.accepts_any = False
        """Whether a loop without gradients is examined, too."""
        self._passive_s = 0.0
        """How long loops that were not examined have taken."""
        self.iterators_created = self.batches_requested = 0
        self.loaders_created = 1
        self._made_anew: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._examined_by: Callable[[], object] | None = None
        """Returns the iterator that began the examined loop; None when it is gone."""
        self._steps_before = self._steps_then = 0
        """How many steps optimizers had made when that loop began, and when it requested its last batch."""
        self.is_cycled = False
        self.other_loops = OtherLoops()
        self._beside_s = 0.0
        """How long other loops in the middle of the examined one have taken."""
        self.evaluation_loaders = EvaluationLoaders()

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The loader whose loop is examined; None before that loop began."""
        return self.session.loader if self.session is not None else None

    @property
    def goes_on(self) -> bool:
        """Whether the trials are over, and the program begins its later epochs."""
        return self.later_epochs is not None and self.later_epochs.is_running

    def accepts(self, *, training: bool) -> bool:
        """Return whether a loop that requests a batch now is the one to examine: a training loop, if there is any.

        Args:
            training: whether gradients are on; a loop with them is one once the program has an optimizer.
        """
        now, self.has_looped = self._clock(), True
        if self._passive_at is not None:
            self._passive_s += min(_PASSIVE_GAP_S, now - self._passive_at)
        self._passive_at = now
        patience_s = max(_NO_GRADIENT_LOOP_S, 0.3 * self._seconds)
        return self.accepts_any or self._passive_s > patience_s or (training and self.optimizers.has_any)

    def examines(self, loader: DataLoader[Any], *, training: bool) -> bool:
        """Return whether `loader` is the one whose loop is examined, or one like it that the loop has made anew."""
        examined = self.loader
        if examined is None or loader is examined:
            return examined is not None
        is_like_it = (
            training
            and loader.dataset is examined.dataset
            and type(loader.sampler) is type(examined.sampler)
            and (loader.batch_size, loader.num_workers) == (examined.batch_size, examined.num_workers)
        )
        if is_like_it and loader not in self._made_anew:
            self._made_anew.add(loader)
            self.loaders_created += 1
        return is_like_it

    def begin(self, loader: DataLoader[Any]) -> None:
        """Examine the loop over `loader`; the caller requests the first batch next."""
        self._say(f"a loop over a loader of {type(loader.dataset).__name__} begins: trials for {self._seconds:.0f} s")
        self.began_at = self._clock()
        budget = TimeBudget(self._seconds, self._clock)
        sources = self._plan(loader, self.has_step)
        self.session = LoopSession(loader, sources, budget, has_step=self.has_step, one_thread=self._one_thread)
        self.session.start()

    def begin_program(self, loader: DataLoader[Any], iterator: object) -> None:
        """Examine the loop over `loader` of a program, which may have more epochs; as `begin` otherwise.

        Args:
            loader: whose batches the loop requests.
            iterator: from which it does so.
        """
        self._examined_by = weakref.ref(iterator)
        self._steps_before = self._steps_then = self.optimizers.steps
        self.later_epochs = LaterEpochs(loader, self._seconds, self._clock)
        self.begin(loader)

    def cuts_short(self, loader: DataLoader[Any], batch_s: float) -> bool:
        """Return whether a loop over another loader, in the middle of the examined one, is to end here.

        Says so once: what the program prints of such a loop is of a part.

        Args:
            loader: the other one.
            batch_s: how long its last batch took, with what the program did with it.
        """
        if self.session is not None:
            self.session.interrupt()
        self._beside_s += batch_s
        is_cut = self._beside_s > _OTHER_LOOPS_S
        if is_cut and not self._has_cut:
            self._has_cut = True
            dataset = type(loader.dataset).__name__
            self._say(f"loops over {dataset} are cut short: results that the program prints now are of a part of it")
        return is_cut

    def forget_a_look(self, *, trains_beside: bool) -> None:
        """Wait for another loop if the examined one was left after a few batches, before any optimizer made a step.

        Args:
            trains_beside: whether optimizers make steps in the loop that requests a batch now, another one.
        """
        examined_by = self._examined_by
        if examined_by is None or self.batches_requested > _LOOK_BATCHES or self._looks >= _MOST_LOOKS:
            return
        is_left = examined_by() is None and self.optimizers.steps == self._steps_before
        if is_left or (trains_beside and self._steps_then == self._steps_before):
            self.forget()

    @property
    def _awaits_steps(self) -> bool:
        """Whether nothing tells yet that the examined loop trains, in a program that has an optimizer."""
        is_open = self._examined_by is not None and not self.accepts_any and self._looks < _MOST_LOOKS
        return is_open and self.optimizers.has_any and self.optimizers.steps == self._steps_before

    def is_untrained_pass(self, loader: DataLoader[Any]) -> bool:
        """Return whether a program with an optimizer has taken a whole epoch without a step of it, as `list(loader)`.

        While it is examined, a loop has no end.
        """
        return self._awaits_steps and self.batches_requested >= (length_of(loader) or math.inf)

    def forget(self) -> None:
        """Wait for another loop: the examined one trains nothing."""
        self._looks += 1
        accepts_any = self.accepts_any
        self.reset()
        self.accepts_any = accepts_any

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        assert self.session is not None
        self._steps_then = self.optimizers.steps
        self.session.may_try = not self._awaits_steps
        try:
            return self.session.next_batch()
        except TrialsDoneError:
            later = self.later_epochs
            if later is None or self.is_cycled or not self.session.is_complete:
                raise
            if not later.begin(self.session.step_calls.trained_models()):
                raise
            self._say("trials are over: the beginning of the next epochs")
            self.session.rest()
            raise StopIteration from None

    def tick(self) -> None:
        """Check that the loop ends in time; called by a signal, between any two instructions.

        Raises:
            TrialsDoneError: the time is over.
        """
        if self.later_epochs is not None and self.later_epochs.is_running:
            self.later_epochs.tick()
        elif self.session is not None:
            self.session.tick()
        elif self.optimizers.trains_without_loader(max(_NO_GRADIENT_LOOP_S, self._seconds), self._passive_at or 0.0):
            raise TrialsDoneError

    def close(self) -> None:
        """Close all sources."""
        if self.later_epochs is not None:
            self.later_epochs.guard.disarm()
        if self.session is not None:
            self.session.close()
