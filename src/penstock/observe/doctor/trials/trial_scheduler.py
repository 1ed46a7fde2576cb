"""The trial scheduler: feeds a loop, as written, from several sources that alternate, so that they can be compared.

A loop over a loader requests a batch, works on it, and requests the next. The scheduler answers the requests. First it
feeds the loop as its own loader would, then in short windows: as is, the same batch repeated, another loader. So
what is measured is the user's own loop, whatever it does, and every "what if" is a trial of that loop.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from penstock.observe.doctor.content_results import EpochOrders, SingleCosts
from penstock.observe.doctor.probe_results import Hang, HotLine, OneLabel, SavedStorages
from penstock.observe.doctor.probes.steps.call_statements import reached_by_loader
from penstock.observe.doctor.probes.steps.evaluation_graphs import EvaluationGraphs
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.probes.worker_activity import WorkerActivityProbe
from penstock.observe.doctor.step_results import CallStatement, MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import Trial
from penstock.observe.doctor.trials.batch_source import BatchSource
from penstock.observe.doctor.trials.epochs.later_epochs import LaterEpochs
from penstock.observe.doctor.trials.evaluation_loaders import EvaluationLoaders
from penstock.observe.doctor.trials.loop_session import LoopSession
from penstock.observe.doctor.trials.loop_without_loader import LoopWithoutLoader
from penstock.observe.doctor.trials.optimizer_watch import OptimizerWatch
from penstock.observe.doctor.trials.other_loops import OtherLoops, RepeatedPasses
from penstock.observe.doctor.trials.time_budget import TimeBudget, TrialsDoneError

_LOOK_BATCHES = 10
"""A loop that is in no other, and is left for good after so few batches, was a look at some of them."""

_THREAD_S = 10.0
"""How long a thread of the program may take to its next batch, when the trials are over."""

_NOTICE = "penstock: no training loop over a DataLoader has started yet; stop with Ctrl-C if there is none\n"


class TrialScheduler:
    """Waits for the loop to examine, then feeds it, as its iterator.

    Args:
        plan: returns the sources for a loader and whether there is a step; the first source is the loop's own loader.
        seconds: how long the trials may take.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        plan: Callable[[DataLoader[Any], bool], Sequence[BatchSource]],
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self._seconds = seconds
        self._clock = clock
        self._began_at = self._created_at = clock()
        self._has_noticed = False
        self._session: LoopSession | None = None
        self.later_epochs: LaterEpochs | None = None
        """Of a program, once it has begun its first epoch."""
        self.step_calls = StepCallRecorder()
        self.activity = WorkerActivityProbe()
        self.has_step = True
        self.accepts_any = False
        """Whether a loop without gradients is examined, too."""
        self.optimizers = OptimizerWatch(self._note_optimizer_step)
        self.without_loader = LoopWithoutLoader(seconds, clock)
        """The steps of a program that trains, while no loop over a DataLoader is examined."""
        self.passive_s = 0.0
        """How long loops that were not examined have taken."""
        self._prepares_since: float | None = None
        """When a loop that comes before any training requested the first batch."""
        self.iterators_created = 0
        self.batches_requested = 0
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
        self.collects_again = False
        """Whether that line is in a loop."""
        self.other_loops = OtherLoops()
        self.repeated_passes = RepeatedPasses()
        self.evaluation_loaders = EvaluationLoaders()
        self.evaluation_graphs = EvaluationGraphs()

    @property
    def began_at(self) -> float:
        """When the examined loop requested its first batch; before that, when the scheduler was made."""
        return self._began_at

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The loader whose loop is examined; None before that loop began."""
        return self._session.loader if self._session is not None else None

    @property
    def batch(self) -> Any:
        """The first batch of the examined loop; None before there was one."""
        return self._session.batch if self._session is not None else None

    @property
    def hang(self) -> Hang | None:
        """Set if the loop was ended because its workers hang."""
        return self._session.watchdog.hang if self._session is not None else None

    @property
    def stream_repeats(self) -> bool:
        """Whether the workers of an IterableDataset all returned the same samples."""
        return self._session is not None and self._session.comparison.repeats

    @property
    def one_label(self) -> OneLabel | None:
        """The label of all samples of the first batches, if they have one and the same."""
        return self._session.labels.result() if self._session is not None else None

    @property
    def epoch_orders(self) -> EpochOrders | None:
        """The order that several epochs of a program have had; None where it changed, or only one was seen."""
        return self.later_epochs.result() if self.later_epochs is not None else None

    @property
    def module_hooks(self) -> tuple[int, ...]:
        """How many hooks modules had after the program's first epoch, and at the start of each later one."""
        return tuple(self.later_epochs.hooks) if self.later_epochs is not None else ()

    @property
    def graphs_of_epochs(self) -> MemoryGrowth | None:
        """What the program keeps of every epoch with the graph that computed it."""
        return self.later_epochs.graphs.growth if self.later_epochs is not None else None

    @property
    def evaluates_later(self) -> bool:
        """Whether the program trains in evaluation mode after its first epoch, and not before."""
        return self.later_epochs is not None and self.later_epochs.evaluates

    @property
    def saved_storages(self) -> SavedStorages | None:
        """What the program saved after its first epochs, if that was far more than its tensors."""
        return self.later_epochs.guard.saved if self.later_epochs is not None else None

    @property
    def single_costs(self) -> tuple[SingleCosts, ...]:
        """What the program's evaluations of single samples take, as far as it has begun several epochs."""
        return self.later_epochs.single_passes.costs() if self.later_epochs is not None else ()

    @property
    def memory_growth(self) -> MemoryGrowth | None:
        """What the program keeps of every step of the examined loop; None where nothing is known to be kept."""
        return self._session.memory_growth if self._session is not None else None

    @property
    def goes_on(self) -> bool:
        """Whether the trials are over, and the program begins its later epochs."""
        return self.later_epochs is not None and self.later_epochs.is_running

    @property
    def step_lines(self) -> tuple[HotLine, ...]:
        """The lines in which the examined loop's steps spend their time."""
        if self._session is None or not self.has_step:
            return ()
        return self._session.step_lines.lines_of_program(reached_by_loader(self._session.loader))

    @property
    def step_statements(self) -> tuple[CallStatement, ...]:
        """The statements of these steps that call something and drop the result, and change nothing of the loader's."""
        if self._session is None or not self.has_step:
            return ()
        return self._session.step_lines.call_statements(reached_by_loader(self._session.loader))

    @property
    def constant_lines(self) -> HotLine | None:
        """What the examined loop's steps spend on lines that compute the same in each of them."""
        constant = self.step_calls.constant_lines
        seen = self._session.step_lines.part_of_program(constant.lines()) if self._session is not None else None
        return replace(seen, fraction=max(seen.fraction, constant.fraction())) if seen is not None else None

    @property
    def called_lines(self) -> tuple[HotLine, ...]:
        """The lines in which the sampler, and a collate function in this process, spend their time meanwhile."""
        return self._session.step_lines.lines_of_program(called=True) if self._session is not None else ()

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
        if self._session is None:
            return False
        examined = self._session.loader
        if loader is examined:
            return True
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
        self.without_loader.close()
        self._began_at = self._clock()
        budget = TimeBudget(self._seconds, self._clock)
        sources = self._plan(loader, self.has_step)
        self._session = LoopSession(loader, sources, budget, self.step_calls, self.activity)
        self._session.start()

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

    def forget_a_look(self) -> None:
        """Wait for another loop if the examined one was left after a few batches, and does not begin again."""
        examined_by = self._examined_by
        if examined_by is None or examined_by() is not None or self.batches_requested > _LOOK_BATCHES:
            return
        accepts_any = self.accepts_any
        self.reset()
        self.accepts_any = accepts_any

    def reset(self) -> None:
        """Forget the loop that was examined: another one is to be."""
        self.close()
        self._over_at, self._has_returned, self.looping_thread = None, False, threading.current_thread()
        self._session = self.later_epochs = self._examined_by = None
        self.step_calls, self.activity = StepCallRecorder(), WorkerActivityProbe()
        self.accepts_any = False
        self.passive_s, self._prepares_since = 0.0, None
        self.iterators_created = 0
        self.batches_requested = 0
        self.loaders_created = 1
        self._made_anew = weakref.WeakSet()
        self.is_cycled = False
        self.other_loops = OtherLoops()
        self.repeated_passes = RepeatedPasses()
        self.evaluation_loaders = EvaluationLoaders()
        self.evaluation_graphs = EvaluationGraphs()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        assert self._session is not None
        try:
            return self._session.next_batch()
        except TrialsDoneError:
            later = self.later_epochs
            if later is None or self.is_cycled or not self._session.is_complete:
                raise
            if not later.begin(self.step_calls.trained_models()):
                raise
            self._session.rest()
            raise StopIteration from None

    def tick(self) -> None:
        """Check that the loop ends in time and does not hang; called by an alarm, between any two instructions.

        A thread that loops ends itself, and then what waits for it: one whose `join` is interrupted counts as stopped,
        for Python until 3.12, while it runs (bpo-45274).

        Raises:
            TrialsDoneError: the time is over, or the workers hang.
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
        elif self._session is not None:
            self._session.tick()
        elif self.without_loader.began_at is not None:
            self.without_loader.tick()
        elif self._clock() - self._created_at > THRESHOLDS.no_loop_notice_s and not self._has_noticed:
            self._has_noticed = True
            sys.stderr.write(_NOTICE)

    def _note_optimizer_step(self, optimizer: Any) -> None:
        if self._session is None:
            self.without_loader.note_step(optimizer)

    def interrupt(self) -> None:
        """Note that the program does something else than the examined loop, such as a validation."""
        if self._session is not None:
            self._session.interrupt()

    def trials(self) -> tuple[Trial, ...]:
        """Return what every source has shown."""
        return self._session.trials() if self._session is not None else ()

    def close(self) -> None:
        """Close all sources."""
        if self.later_epochs is not None:
            self.later_epochs.guard.disarm()
        self.step_calls.leave()
        self.without_loader.close()
        if self._session is not None:
            self._session.close()
