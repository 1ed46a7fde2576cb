"""The trial scheduler: feeds a loop, as written, from several sources that alternate, so that they can be compared.

A loop over a loader requests a batch, works on it, and requests the next. The scheduler answers the requests. First it
feeds the loop as its own loader would, then in short windows: as is, the same batch repeated, another loader. So
what is measured is the user's own loop, whatever it does, and every "what if" is a trial of that loop.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.epochs.later_epochs import LaterEpochs
from penstock.observe.doctor.trials.evaluation_loaders import EvaluationLoaders
from penstock.observe.doctor.trials.loop_session import LoopSession
from penstock.observe.doctor.trials.optimizer_watch import OptimizerWatch
from penstock.observe.doctor.trials.other_loops import OtherLoops, RepeatedPasses
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError

_LOOK_BATCHES = 10
"""A loop that is in no other, and is left for good after so few batches, was a look at some of them."""

_THREAD_S = 10.0
"""How long a thread of the program may take to its next batch, when the trials are over."""


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
        self.reset()

    def reset(self) -> None:
        """Forget the loop that was examined: another one is to be."""
        if hasattr(self, "session"):
            self.close()
        self.began_at = self._created_at
        """When the examined loop requested its first batch; before that, when the scheduler was made."""
        self.session: LoopSession | None = None
        self.later_epochs: LaterEpochs | None = None
        """Of a program, once it has begun its first epoch."""
        self.accepts_any = False
        """Whether a loop without gradients is examined, too."""
        self.passive_s = 0.0
        """How long loops that were not examined have taken."""
        self._prepares_since: float | None = None
        """When a loop that comes before any training requested the first batch."""
        self.iterators_created = self.batches_requested = 0
        self.loaders_created = 1
        self._made_anew: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._examined_by: Callable[[], object] | None = None
        """Returns the iterator that began the examined loop; None when it is gone, or the loop may begin again."""
        self.looping_thread = threading.current_thread()
        """The thread of the program whose loop is examined."""
        self._over_at: float | None = None
        self._has_returned = False
        self.is_cycled = False
        self.collected_at = ""
        """The line of a program that takes all batches of an epoch at once: its loader is examined alone."""
        self.other_loops = OtherLoops()
        self.repeated_passes = RepeatedPasses()
        self.evaluation_loaders = EvaluationLoaders()

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The loader whose loop is examined; None before that loop began."""
        return self.session.loader if self.session is not None else None

    @property
    def goes_on(self) -> bool:
        """Whether the trials are over, and the program begins its later epochs."""
        return self.later_epochs is not None and self.later_epochs.is_running

    def accepts(self, *, training: bool, frame: FrameType) -> bool:
        """Return whether a loop that requests a batch now is the one to examine: a training loop, if there is any.

        Args:
            training: whether gradients are on.
            frame: the code that requests the batch.
        """
        patience_s, now = max(THRESHOLDS.no_gradient_loop_s, 0.3 * self._seconds), self._clock()
        if self.accepts_any or self.passive_s > patience_s:
            return True
        if training and self.optimizers.precedes_training(frame):
            self._prepares_since = now if self._prepares_since is None else self._prepares_since
            return now - self._prepares_since > patience_s
        return training

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

    def begin_program(self, loader: DataLoader[Any], iterator: object, *, is_repeated: bool) -> None:
        """Examine the loop over `loader` of a program, which may have more epochs; as `begin` otherwise.

        Args:
            loader: whose batches the loop requests.
            iterator: from which it does so.
            is_repeated: whether another loop is around it.
        """
        self._examined_by = None if is_repeated else weakref.ref(iterator)
        self.looping_thread = threading.current_thread()
        self.later_epochs = LaterEpochs(loader, self._seconds, self._clock)
        self.begin(loader)

    def note_cut(self, dataset: str) -> None:
        """Say once that a loop of the program over another loader is cut short: what it prints is of a part."""
        if not self._has_cut:
            self._has_cut = True
            self._say(f"loops over {dataset} are cut short: results that the program prints now are of a part of it")

    def forget_a_look(self) -> None:
        """Wait for another loop if the examined one was left after a few batches, and does not begin again."""
        examined_by = self._examined_by
        if examined_by is None or examined_by() is not None or self.batches_requested > _LOOK_BATCHES:
            return
        accepts_any = self.accepts_any
        self.reset()
        self.accepts_any = accepts_any

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        assert self.session is not None
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

        A thread that loops ends itself, and then what waits for it: one whose `join` is interrupted counts as stopped,
        for Python until 3.12, while it runs (bpo-45274).

        Raises:
            TrialsDoneError: the time is over.
        """
        if self.looping_thread is threading.current_thread():
            self._check_time()
        elif self._has_returned:
            return
        elif self._over_at is None:
            try:
                self._check_time()
            except TrialsDoneError:
                self._over_at = self._clock()
        elif self._clock() > self._over_at + _THREAD_S:
            raise TrialsDoneError

    @property
    def is_over(self) -> bool:
        """Whether the time is over, and a thread of the program that loops ends when it requests the next batch."""
        return self._over_at is not None

    @property
    def ends_thread(self) -> bool:
        """Whether this thread is one of the program that loops, and is to end."""
        is_ending = self.is_over or self._has_returned
        return is_ending and threading.current_thread() is self.looping_thread

    def end_thread(self) -> None:
        """End a thread that loops after the program has returned, and wait for that."""
        if self.looping_thread is not threading.current_thread():
            self._has_returned = True
            self.looping_thread.join(_THREAD_S)

    def _check_time(self) -> None:
        if self.later_epochs is not None and self.later_epochs.is_running:
            self.later_epochs.tick()
        elif self.session is not None:
            self.session.tick()
        elif self.optimizers.trains_without_loader(max(THRESHOLDS.no_gradient_loop_s, self._seconds)):
            raise TrialsDoneError

    def close(self) -> None:
        """Close all sources."""
        if self.later_epochs is not None:
            self.later_epochs.guard.disarm()
        if self.session is not None:
            self.session.close()
