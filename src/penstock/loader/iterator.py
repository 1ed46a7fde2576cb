"""LoaderIterator: one pass of a loop over a DataLoader (many, with persistent workers), and what it counts."""

from __future__ import annotations

import copy
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from penstock.core.errors import OptionError, RankError, StateError
from penstock.core.signals.interrupts import uninterrupted_finalizer
from penstock.data.source import Source
from penstock.distributed.failure_alarm import FailureAlarm, start_failure_alarm
from penstock.distributed.step_counts import StepCounts, step_counts
from penstock.loader.begin_epoch import begin_epoch, epoch_set, take_epoch
from penstock.loader.even_batches import EvenBatches
from penstock.loader.factory import build_pipeline
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.stream_cursor import Consumed
from penstock.loader.scheduling.inline import InlineScheduler

_is_profiling = torch._C._autograd._profiler_enabled


class LoaderIterator(_BaseDataLoaderIter):
    """Iterates over one epoch of a `DataLoader`; over many, where workers are persistent.

    Of torch's class it has only the type, by which frameworks tell a loader's iterator from others (Lightning does, to
    leave it out when it pickles), and some attributes to read.

    Args:
        runtime: of the loader, which the iterator writes to. Each pass has the config that is the runtime's when the
            pass begins.
    """

    _profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    _frames_to_loop = 4
    """From where a length is warned of to the loop's line, as which torch's warning comes."""

    # What programs read of torch's iterator; to set one is an AttributeError.
    _num_yielded: Any = property(attrgetter("_yielded"))
    _base_seed: Any = property(attrgetter("_epoch.base_seed"))
    _num_workers: Any = property(attrgetter("_config.num_workers"))
    _index_sampler: Any = property(attrgetter("_config.index_sampler"))
    _dataset: Any = property(attrgetter("_config.dataset"))
    _collate_fn: Any = property(attrgetter("_config.collate_fn"))
    _persistent_workers: Any = property(attrgetter("_config.persistent_workers"))

    @property
    def _sampler_iter(self) -> NoReturn:
        raise AttributeError(
            "penstock's iterator has no _sampler_iter, from which to draw would change what batches come; resume with "
            "loader.state_dict() and load_state_dict()"
        )

    def __init__(self, runtime: LoaderRuntime) -> None:
        config = self._config = runtime.config
        self._runtime = runtime
        self._counters = runtime.counters
        self._alarm = start_failure_alarm() if config.is_distributed else None
        self._began_ns = time.perf_counter_ns()
        self._counters.begun_ns = self._counters.begun_ns or self._began_ns
        self._returned_ns = 0
        self._yielded = 0
        self.is_over = False
        try:
            self._epoch = begin_epoch(config, runtime)
            self.pipeline = build_pipeline(config, runtime, self._epoch)
        except Exception as error:
            self._signal_alarm(error)
            if self._alarm is not None:
                self._alarm.close()
            raise
        self._even = self._evened()
        is_kept = runtime.kept is not None and runtime.kept[1] is self.pipeline
        self._workers = [] if is_kept else self.pipeline.processes
        self._finalizer = None if is_kept else self._end_later()
        self._count_length()
        self._counters.loop = weakref.ref(self)

    def _end_later(self) -> weakref.finalize[..., Any]:
        """Have `_end` called when this object is gone, by something that does not refer to it."""
        pipeline, resources = self.pipeline, self._runtime.resources
        finalizer = weakref.finalize(
            self,
            _close,
            pipeline.end_copies,
            pipeline.scheduler.close,
            functools.partial(resources.ring_cache.put, pipeline.ring, shared=self._config.shares_memory),
            self._alarm,
        )
        finalizer.atexit = False  # Python may have torn down what these need
        return finalizer

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the same workers (called by torch's `DataLoader.__iter__`)."""
        self._began_ns = time.perf_counter_ns()
        if not self.pipeline.scheduler.is_open:
            raise RuntimeError("these persistent workers have been shut down; make a new DataLoader")
        self._config = self._runtime.config
        self._epoch = begin_epoch(self._config, self._runtime, self._epoch.base_seed)
        self.pipeline.batches.begin(self._epoch)
        self._even = self._evened()
        self._returned_ns = 0
        self._yielded = 0
        self.is_over = False
        self._count_length()

    def __iter__(self) -> LoaderIterator:
        return self

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled, as torch's iterators do."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be pickled: its workers and slots are this process's; pickle the "
            "DataLoader, and its state_dict() for the position"
        )

    def __len__(self) -> int:
        return len(self._config.index_sampler)

    def __next__(self) -> Any:
        began, counters = time.perf_counter_ns(), self._counters
        if self._runtime.resume is not None or not self._yielded:
            self._follow_program()
        if self.is_over:
            raise StopIteration
        if self._alarm is not None:
            self._alarm.check()
        stepped = self._returned_ns
        if stepped:
            counters.step_ns += began - stepped
        counted_ns = counters.wait_ns + counters.inline_ns + counters.workers_ns
        try:
            # torch's record_function takes some microseconds, also when nothing is recorded.
            batch = self._next_recorded() if _is_profiling() else self._next_batch()
        except StopIteration:
            if counters.recorder is not None and stepped:
                counters.recorder.add_step(stepped, began, counters.epochs, self._yielded - 1)
            self._finish()
            if self._yielded or self._epoch.is_whole:
                raise
            return self._after_nothing()
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._returned_ns = returned = time.perf_counter_ns()
            counted_ns = counters.wait_ns + counters.inline_ns + counters.workers_ns - counted_ns
            counters.transport_ns += returned - began - counted_ns
        if counters.recorder is not None:
            counters.recorder.add_turn(stepped, began, returned, counters.epochs, self._yielded)
        self._note_handed_out()
        return batch

    def _follow_program(self) -> None:
        """Begin where `load_state_dict` or `set_epoch` has said since, while no batch was handed out.

        Raises:
            StateError: a state was loaded after that.
        """
        runtime, epoch = self._runtime, self._epoch
        if runtime.epoch is not epoch or self.is_over:
            return
        if runtime.resume is not None and self._yielded:
            raise StateError(
                f"a state was loaded after this loop had handed out {self._yielded} batches, and the next loop begins "
                "with it; begin that loop (iter(loader)), or load the state before the first batch"
            )
        wanted = epoch_set(self._config, runtime)
        if runtime.resume is not None or (wanted is not None and wanted != epoch.number and epoch.is_whole):
            self._restart()
        elif wanted == epoch.number:
            take_epoch(self._config, runtime, wanted)

    def _after_nothing(self) -> Any:
        """Return the first batch of the next epoch, after a resumed pass of which nothing was left.

        Raises:
            StopIteration: the program has asked for this epoch, or other ranks may have some of it left.
        """
        if self._epoch.leads_on:
            self._restart()
            return next(self)
        warnings.warn(
            f"nothing was left of epoch {self._epoch.number} where the state was taken that this loop has resumed, so "
            "it is empty; the next loop is the next epoch",
            stacklevel=self._frames_to_loop - 1,
        )
        raise StopIteration

    def _restart(self) -> None:
        """Begin the runtime's next pass in the place of this one, of which nothing was handed out."""
        self._shutdown_workers()
        if self._finalizer is not None:
            self._finalizer()
        self.__init__(self._runtime)  # type: ignore[misc]

    def _note_handed_out(self) -> None:
        """Note the batch that is handed out now."""
        epoch = self._epoch
        if epoch.stream_epoch is not None:
            self._check_epoch()
        epoch.consume(self.pipeline.batches.consumed if self._even is None else self._consumed)
        epoch.handed_out = self._yielded = yielded = self._yielded + 1
        if yielded == 1:
            self._counters.first_batch_ns = self._returned_ns - self._began_ns
        if self._announced is not None and yielded > self._announced:
            self._warn_of_length()

    def _next_recorded(self) -> Any:
        with torch.autograd.profiler.record_function(self._profile_name):
            return self._next_batch()

    def _evened(self) -> EvenBatches | None:
        """Return what has all ranks hand out as many batches of a stream; None where that is not asked for."""
        config, runtime, epoch = self._config, self._runtime, self._epoch
        self._consumed: Sequence[Consumed] = ()
        if not config.is_evened or epoch.shard_cursor is None:
            return None
        epoch.shard_cursor.current = None  # without workers, the dataset is ahead of the loop, too

        def counts() -> StepCounts:
            if runtime.step_counts is None:
                runtime.step_counts = step_counts(config.group_ranks)
            return runtime.step_counts

        def again() -> LoaderIterator:
            """Read this rank's share from its beginning, in this process."""
            inline: dict[str, Any] = {
                "num_workers": 0,
                "persistent_workers": False,
                "prefetch_factor": None,
                "timeout": 0,
            }
            own: dict[str, Any] = {
                "dataset": copy.copy(config.dataset),
                "is_distributed": False,
                "announced_length": None,
            }
            alone = replace(config, **inline, **own)
            return make_iterator(LoaderRuntime(config=alone, order=runtime.order, next_epoch=epoch.number))

        return EvenBatches(
            counts,
            pads=config.uneven == "pad",
            is_whole=epoch.is_whole,
            again=again,
            check=self._alarm.check if self._alarm is not None else _nothing,
        )

    def _make_batch(self) -> tuple[Any, Sequence[Consumed]]:
        """Return a batch, and what handing it out will consume, with the stream's state after it."""
        return self._next_made(), self.pipeline.batches.consumed

    def _next_batch(self) -> Any:
        if self._even is None:
            return self._next_made()
        batch, self._consumed = self._even.next_batch(self._make_batch)
        return batch

    def _next_made(self) -> Any:
        pipeline = self.pipeline
        try:
            batch = pipeline.batches.next_batch()
        except StopIteration:
            self._check_count(len(pipeline.scheduler.consumed_since))
            raise
        if len(pipeline.batches.consumed) > 1:
            self._check_count(len(pipeline.batches.consumed) - 1)
        return batch if pipeline.finish_pinning is None else pipeline.finish_pinning(batch)

    def _check_count(self, empty: int) -> None:
        """Raise if batches were left out because nothing was left of them, and all ranks must have as many."""
        share, config = self._runtime.order.share, self._config
        if not empty or config.errors == "raise" or config.is_iterable or share.world == 1 or share.uneven == "join":
            return
        indices = ", ".join(map(repr, self._counters.skipped_indices[-3:]))
        raise RankError(
            f"all samples of a batch of rank {share.rank} have failed (of those left out, some have the indices "
            f"{indices}), so it has {empty} fewer batches than other ranks, which would wait for it in their next "
            "collective; have errors= return a sample in the place of one that fails, make batches larger, or give "
            "distributed=True, uneven='join' where ranks need not have as many (torch.distributed.algorithms.Join)"
        )

    def _check_epoch(self) -> None:
        """Raise if the mixture that this pass reads has been set to another epoch."""
        dataset, epoch = self._config.dataset, self._epoch.stream_epoch
        if isinstance(dataset, Source) and dataset.epoch != epoch:
            raise OptionError(
                f"this loop reads epoch {epoch} of a mixture, and meanwhile another loop, or set_epoch, has set it to "
                f"epoch {dataset.epoch}, of which its next batches would be; give each loop a mixture of its own: "
                "copy.deepcopy(mixture)"
            )

    def _finish(self) -> None:
        self.is_over = True
        self._epoch.finish(self.pipeline.scheduler.consumed_since)
        self._counters.epochs += 1
        if self._finalizer is not None and not self._config.persistent_workers:
            with self._counters.changing_workers():
                self._shutdown_workers()
            if not self.pipeline.copies_ahead and (ending := self._finalizer.detach()) is not None:
                _end(*ending[2])  # here a Ctrl-C cannot be lost, and to hold it back takes as long as a small batch

    def _shutdown_workers(self) -> None:
        """Stop the workers now (the name that Lightning and others call on torch's iterator)."""
        self.is_over = True
        self.pipeline.scheduler.close()
        if self._alarm is not None:
            self._alarm.close()

    def _fail(self, error: Exception) -> None:
        """End the pass if the error has ended the workers, as torch's ends; its state says that it is unfinished."""
        self._signal_alarm(error)
        self.is_over = self._config.num_workers > 0 and not self.pipeline.scheduler.is_open

    def _signal_alarm(self, error: Exception) -> None:
        if self._alarm is not None:
            self._alarm.signal(error)

    def _count_length(self) -> None:
        """Note how many batches the epoch has, as far as that is known."""
        config = self._config
        self._announced = config.announced_length if config.is_iterable and self._even is None else None
        self._counters.length = self._announced if config.is_iterable else _length(config.index_sampler)

    def _warn_of_length(self) -> None:
        message = (
            f"Length of IterableDataset {self._config.dataset} was reported to be {self._announced} "
            f"(when accessing len(dataloader)), but {self._yielded} samples have been fetched. "
        )
        if self._config.num_workers > 0:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(message, stacklevel=self._frames_to_loop)


class _InlineIterator(LoaderIterator, _SingleProcessDataLoaderIter):
    """Without workers: what programs tell from torch's other iterator by its class.

    What torch does for a batch takes 20 µs. So a pass that asks for nothing else has a `__next__` of its own.
    """

    _frames_to_loop = 5

    def __init__(self, runtime: LoaderRuntime) -> None:
        super().__init__(runtime)
        pipeline, cursor = self.pipeline, self._epoch.batch_cursor
        is_watched = self._alarm is not None or self._counters.recorder is not None
        is_watched = is_watched or pipeline.copies_ahead or self._epoch.stream_epoch is not None
        is_plain = cursor is not None and cursor.is_plain and not is_watched
        self._plain = pipeline.inline if is_plain and pipeline.inline and pipeline.inline.is_plain else None

    def __next__(self) -> Any:
        if self._runtime.resume is not None or not self._yielded:
            self._follow_program()
        if self._plain is None:
            return super().__next__()
        if _is_profiling():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._next_plain(self._plain)
        return self._next_plain(self._plain)

    def _next_plain(self, plain: InlineScheduler) -> Any:
        began, counters, cursor = time.perf_counter_ns(), self._counters, self._epoch.batch_cursor
        assert cursor is not None
        if self.is_over:
            raise StopIteration
        if self._returned_ns:
            counters.step_ns += began - self._returned_ns
        try:
            indices = cursor.draw()
            batch = plain.make_plain(indices.tolist() if type(indices) is np.ndarray else indices)
        except StopIteration:
            self._finish()
            raise
        finally:
            self._returned_ns = time.perf_counter_ns()
        cursor.take()
        if not self._yielded:
            counters.first_batch_ns = self._returned_ns - self._began_ns
        self._epoch.handed_out = self._yielded = self._yielded + 1
        return batch


class _WorkersIterator(LoaderIterator, _MultiProcessingDataLoaderIter):
    """With workers, of whatever type."""

    _profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def __del__(self) -> None:
        """Nothing, where torch's stops its workers: a finalizer of this object does, see `_end_later`."""


class _PersistentIterator(_WorkersIterator):
    """With workers that go on to the next pass.

    A loop may be left while a thread still reads ahead for it (over a BackgroundGenerator). With torch's iterator,
    which goes on as the same object, that thread takes batches of the next pass, or breaks it. So each pass has an
    object of its own here. The thread that has begun the last pass may use any of them as that pass's; for other
    threads the older ones are over.
    """

    _frames_to_loop = 5

    def __init__(self, runtime: LoaderRuntime) -> None:
        self._one_at_a_time = threading.RLock()
        self._successor: _PersistentIterator | None = None
        self._thread = threading.get_ident()
        """That has begun the pass."""
        super().__init__(runtime)

    def __next__(self) -> Any:
        with self._one_at_a_time:
            if self._successor is None:
                return super().__next__()
            if threading.get_ident() != self._successor.thread():
                raise StopIteration
        return next(self._successor)

    def thread(self) -> int:
        """Return the thread that has begun the pass that these workers are in."""
        return self._thread if self._successor is None else self._successor.thread()

    def succeed(self) -> _PersistentIterator:
        """Return the object of the next pass, as soon as the batch has come that is waited for; it has the workers."""
        with self._one_at_a_time:
            new = object.__new__(type(self))
            vars(new).update(vars(self))
            if self._finalizer is not None and self._finalizer.detach() is not None:
                new._finalizer = new._end_later()
            new._thread = threading.get_ident()
            new._counters.loop = weakref.ref(new)
            self._successor = new
            return new

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with self._one_at_a_time:
            super()._reset(loader, first_iter)


def next_iterator(before: LoaderIterator) -> LoaderIterator:
    """Return the iterator of the next pass of workers that persist."""
    return before.succeed() if isinstance(before, _PersistentIterator) else before


def make_iterator(runtime: LoaderRuntime) -> LoaderIterator:
    """Return the iterator of a loader's next pass."""
    config = runtime.config
    if config.num_workers == 0:
        return _InlineIterator(runtime)
    return (_PersistentIterator if config.persistent_workers else _WorkersIterator)(runtime)


def _nothing() -> None:
    """Nobody is heard of."""


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:  # noqa: BLE001  a sampler of the user's may have no length, or one that fails
        return None


def _end(
    end_copies: Callable[[], object] | None,
    stop_workers: Callable[[], Any],
    return_ring: Callable[[], None],
    alarm: FailureAlarm | None,
) -> None:
    """End what an iterator has under way, all of it, whatever fails; the next one takes the ring."""
    try:
        if end_copies is not None:
            end_copies()  # they read the ring's slots
    finally:
        try:
            if alarm is not None:
                alarm.close()
        finally:
            try:
                stop_workers()
            finally:
                return_ring()


_close = uninterrupted_finalizer(_end)
