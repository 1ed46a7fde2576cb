"""The conductor: a loop runs as it was written, and gets its batches from one source after another.

A loop over a loader asks for a batch, works on it, and asks for the next. The conductor answers. It first feeds the
loop as its own loader would (and looks inside of some steps), then in short stretches by turns: as it is, the same
batch again and again, another loader in its place. So what is measured is the user's own loop, whatever it is, and
every "what if" is a trial of it. Sources that wait for their turn are stopped: they neither compute nor run ahead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from penstock.observe.doctor.crew import Crew, HangWatch
from penstock.observe.doctor.sources import Repeated, Source, are_equal, in_new_containers
from penstock.observe.doctor.witness import StepWitness
from penstock.observe.examination import Hang
from penstock.observe.trial import AS_IT_IS, FREE, Stretch, Trial, gain

_LOOKS = 3
_WARM = 3
_LEAST_STRETCH_S = 0.12
_HARDLY = 1.03
_PASSIVE_S = 3.0
_READY = 0.5
_SLOW_START = 0.1
_AT_ONCE_S = 0.003
_ENOUGH_BATCHES = 8
_STUCK_S = 0.5
_LONG_S = 1.0
_LONG_PREPARING_S = 10.0
_LATE, _LATE_S, _FIRST_S = 1.5, 2.0, 15.0


class EnoughError(BaseException):
    """Enough has been seen: ends the loop. No program catches it by mistake, as it is no `Exception`."""


class Conductor:
    """Feeds one loop, as an iterator, and measures it.

    Args:
        plan: makes the sources for a loader; the first is the loop as it is.
        seconds: how long all of it may take.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        plan: Callable[[DataLoader[Any], bool], Sequence[Source]],
        seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan = plan
        self._seconds = seconds
        self._clock = clock
        self.has_step = True
        self.witness = StepWitness()
        self.crew = Crew()
        self._made = clock()
        self._has_told = False
        self._sources: list[Source] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.close()
        self.loader: DataLoader[Any] | None = None
        self.batch: Any = None
        self.takes_any = False
        self.passive_s = 0.0
        self.asked = 0
        self.beginnings = 0
        self._waits_since = math.inf
        self._longest_wait_s = 0.0
        self._has_batch = False
        self._hangs = HangWatch()
        self.hang: Hang | None = None
        self._has_paused = False
        self.is_gentle = False
        self.repeats_itself = False
        self._first: list[Any] = []
        self._batches = 0
        self._stretches: dict[str, list[Stretch]] = {}

    def is_for(self, *, training: bool) -> bool:
        """Say whether a loop that asks now is the one to examine: a training loop, or where there is none, any."""
        return training or self.takes_any or self.passive_s > max(_PASSIVE_S, 0.3 * self._seconds)

    def begin(self, loader: DataLoader[Any]) -> None:
        """Examine the loop over `loader`; the caller asks for the first batch next."""
        self.loader = loader
        self._began = self._clock()
        self._sources = list(self._plan(loader, self.has_step))
        self._source = self._sources[0]
        self._round: list[Source] = []
        self._stretch_s = 0.0
        self._is_warming = True
        self._warmed = 0
        self._has_started = False
        self._is_interrupted = False
        self._is_cut = False
        self._returned_at: float | None = None
        if self._source.runs_here:
            # Forked workers must not inherit files that the dataset opens when it is first asked.
            self._open([source for source in self._alive[1:] if source.starts_processes])
        self._clear()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        now = self._clock()
        self.witness.leave()
        if self._is_interrupted:
            self._go_on_after_interruption()
        if self._returned_at is not None:
            self._step_s += now - self._returned_at
            self._batches += 1
        self._advance(now)
        began = self._waits_since = self._clock()
        try:
            batch = self._next_batch()
            self._has_batch = True
        finally:
            self._waits_since = math.inf
            self._returned_at = self._clock()
            if self._source.startup_s is not None and not self._has_started:
                self._has_started = True
                self._began = began = self._returned_at  # however long its workers took to start
                self._clear()
            self._wait_s += self._returned_at - began
            self._longest_wait_s = max(self._longest_wait_s, self._returned_at - began)
        if self._is_warming and _WARM <= self._warmed < _WARM + _LOOKS:
            self.witness.enter()
        return batch

    def tick(self) -> None:
        """See to it that the loop ends in time; called now and then, between any two instructions.

        And that no source waits for one that was stopped: a dataset may have a lock that all its workers share, and a
        worker may have been stopped while it held it.

        Raises:
            EnoughError: the time is over, or workers hang.
        """
        now = self._clock()
        if self.loader is None:  # the program prepares for its loop, and may take its time
            if now - self._made > _LONG_PREPARING_S and not self._has_told:
                self._has_told = True
                sys.stderr.write("penstock: no training loop over a DataLoader yet; Ctrl-C if none is to come\n")
            return
        if now - self._began > self._seconds * _LATE + (_LATE_S if self._has_batch else _FIRST_S):
            raise EnoughError
        waits_s = now - self._waits_since
        if waits_s > _LONG_S:
            self.hang = self._hangs.look(self._source.workers(), now, waits_s)
            if self.hang is not None:
                raise EnoughError
        if waits_s > max(_STUCK_S, 3 * self._longest_wait_s) and not self.is_gentle and self._has_paused:
            self.is_gentle = True
            for source in self._sources:
                source.resume()
            self._is_interrupted = True  # what is timed now is worth nothing

    def interrupt(self) -> None:
        """End the stretch here: the program has turned to something else, a validation say."""
        if not self._is_interrupted and not self._is_warming and self._returned_at is not None:
            self._is_cut = self._batches >= _ENOUGH_BATCHES
            if self._is_cut:
                self._keep(self._returned_at)  # without the last batch, whose step may have been over long since
        self._is_interrupted = True

    def trials(self) -> tuple[Trial, ...]:
        """Return what has been seen of every source."""
        if self._batches and not self._stretches:  # the program ended before its loop was warm
            self._keep(self._clock())
        return tuple(
            Trial(
                name=source.name,
                line=source.line,
                stretches=tuple(self._stretches.get(source.name, ())),
                startup_s=source.restart_s or source.startup_s,
                failure=source.failure,
            )
            for source in self._sources
        )

    def close(self) -> None:
        """Let go of all sources."""
        self.witness.leave()
        for source in self._sources:
            source.close()

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _alive(self) -> list[Source]:
        return [source for source in self._sources if source.is_live]

    def _clear(self) -> None:
        self._stretch_began = self._clock()
        self._batches, self._wait_s, self._step_s = 0, 0.0, 0.0

    def _advance(self, now: float) -> None:
        """Go on to the next stretch where this one is over, and end the loop after the last."""
        if self._is_warming:
            self._warm_up(now)
        elif self._batches and now - self._stretch_began >= self._stretch_s:
            self._keep(now)
            if now - self._began > self._seconds and not self._must_go_on():
                raise EnoughError
            self._take_turns()

    def _go_on_after_interruption(self) -> None:
        self._is_interrupted = False
        self._returned_at = None
        if self._is_cut:
            self._is_cut = False
            self._take_turns()
        else:
            self._clear()

    def _warm_up(self, now: float) -> None:
        """See to it that the loop as it is has run for a little while, before anything counts."""
        if self._returned_at is None:
            return
        self._warmed += 1
        spent = now - self._began
        enough = self._warmed >= _WARM + _LOOKS and spent > self._seconds / 10
        if not enough and spent < self._seconds / 4:
            return
        self._source.pause()  # or it would run ahead meanwhile
        self._has_paused = True
        self._open([source for source in self._affordable() if source.starts_processes])
        self._open([source for source in self._alive[1:] if not source.starts_processes])
        self._give_the_batch()
        left = self._seconds - (self._clock() - self._began)
        self._stretch_s = max(_LEAST_STRETCH_S, left / (len(self._alive) * 5))
        self._is_warming = False
        self._take_turns()

    def _must_go_on(self) -> bool:
        """Say whether the most important trial has not had its turn yet."""
        return any(source.name == FREE and not self._stretches.get(FREE) for source in self._alive)

    def _take_turns(self) -> None:
        """Let the next source of the round go on; the first of all again where the round is over."""
        if not self.is_gentle:
            self._source.pause()
        self._round = [source for source in self._round if source.is_live]
        if not self._round:
            self._drop_the_hopeless()
            self._round = self._alive
        self._source = self._round.pop(0)
        self._source.resume()
        if not self._settle(self._source):
            self._take_turns()
            return
        self._returned_at = None
        if self._source.name == AS_IT_IS:
            self.crew.begin(self._source.workers())
        self._clear()

    def _drop_the_hopeless(self) -> None:
        """Give the time that is left to what can still matter: a change that loses twice is not tried a third time.

        Nothing gains more than free loading would; where that gains nothing, nothing else is tried further.
        """
        before = Trial(name=AS_IT_IS, stretches=tuple(self._stretches.get(AS_IT_IS, ())))
        nothing_to_gain = False
        for source in self._alive[1:]:
            found = gain(before, Trial(name=source.name, stretches=tuple(self._stretches.get(source.name, ()))))
            if found is None or found.rounds < 2:
                continue
            if source.name == FREE:
                nothing_to_gain = found.median < _HARDLY and found.rounds > 2
            elif found.high < 1.0 or nothing_to_gain:
                source.retire()

    def _open(self, sources: Sequence[Source]) -> None:
        """Start sources side by side, and let each come into step before it is stopped."""
        new = [source for source in sources if not source.is_open]
        for source in new:
            self._try(source, source.open)
        for source in new:
            if source.starts_processes and self._clock() - self._began > self._seconds * _READY:
                source.retire()
            self._waits_since = self._clock()
            self._try(source, source.warm)
            self._waits_since = math.inf
            if not self.is_gentle:
                source.pause()
                self._has_paused = True

    def _affordable(self) -> list[Source]:
        """Return the other sources; only the first of them where starting workers takes long (spawned: seconds)."""
        others = self._alive[1:]
        startup_s = self._alive[0].startup_s or 0.0
        if self._alive[0].runs_here or startup_s < self._seconds * _SLOW_START:
            return others
        count = int(self._seconds * _READY / startup_s)
        starting = [source for source in others if source.starts_processes]
        for source in starting[count:]:
            source.retire()
        return [source for source in others if source.is_live]

    def _try(self, source: Source, act: Callable[[], None]) -> None:
        if source.is_live:
            try:
                act()
            except Exception as error:
                source.fail(error)

    def _give_the_batch(self) -> None:
        for source in self._alive:
            if isinstance(source, Repeated):
                source.batch = self.batch

    def _keep(self, now: float) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
            now = self._clock()
        if self._source.name == AS_IT_IS:
            self.crew.end()
        stretch = Stretch(
            batches=self._batches,
            wall_s=max(1e-9, now - self._stretch_began),
            wait_s=self._wait_s,
            step_s=self._step_s,
        )
        self._stretches.setdefault(self._source.name, []).append(stretch)

    def _compare(self, batch: Any) -> None:
        """Find out from the first batches whether the workers of a stream all give the same samples.

        The first n batches come from n workers, one each; batch n is the second of the first worker, and must differ.
        """
        loader = self.loader
        if loader is None or loader._dataset_kind != _DatasetKind.Iterable or loader.num_workers < 2:
            return
        if len(self._first) > loader.num_workers or not self._is_warming:
            return
        self._first.append(in_new_containers(batch, copied=True))
        if len(self._first) > loader.num_workers:
            one, other, later = self._first[0], self._first[1], self._first[-1]
            self.repeats_itself = are_equal(one, other) and not are_equal(one, later)

    def _settle(self, source: Source) -> bool:
        """Take away what a source had made ahead before its first turn; return whether it still works."""
        if source.is_settled:
            return True
        source.is_settled = True
        try:
            for _ in range(source.ahead):
                began = self._clock()
                source.next_batch()
                if self._clock() - began > _AT_ONCE_S:
                    break
        except Exception as error:
            source.fail(error)
        return source.is_live

    def _next_batch(self) -> Any:
        while True:
            try:
                batch = self._source.next_batch()
            except Exception as error:
                if self._source.name == AS_IT_IS:
                    raise
                self._source.fail(error)
                self._take_turns()
                continue
            self._compare(batch)
            if self.batch is None:
                self.batch = in_new_containers(batch)  # the step may take apart what it gets
            return batch
