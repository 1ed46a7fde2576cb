"""The conductor: a loop runs as it was written, and gets its batches from one source after another.

A loop over a loader asks for a batch, works on it, and asks for the next. The conductor answers. It first feeds the loop
as its own loader would (and looks inside of some steps), then in short stretches by turns: as it is, the same batch
again and again, another loader in its place. So what is measured is the user's own loop, whatever it is, and every
"what if" is a trial of it. Sources that wait for their turn are stopped, so that they neither compute nor run ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.observe.doctor.crew import Crew
from penstock.observe.doctor.sources import Repeated, Source, iterate
from penstock.observe.doctor.witness import StepWitness
from penstock.observe.examination import AS_IT_IS, FREE, Stretch, Trial, gain

_LOOKS = 3
_WARM = 3
_PASSIVE_S = 3.0
_LEAST_STRETCH_S = 0.12
_HARDLY = 1.03
_READY = 0.5
_SLOW_START = 0.1
_AT_ONCE_S = 0.003


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
        self._sources: list[Source] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.close()
        self.loader: DataLoader[Any] | None = None
        self.batch: Any = None
        self.asked = 0
        self.beginnings = 0
        self._stretches: dict[str, list[Stretch]] = {}

    def begin(self, loader: DataLoader[Any]) -> None:
        """Examine the loop over `loader`; the caller asks for the first batch next."""
        self.loader = loader
        self._began = self._clock()
        self._sources = list(self._plan(loader, self.has_step))
        self._stretch_s = 0.0
        self._turn = 0
        self._warmed = 0
        self._has_started = False
        self._returned_at: float | None = None
        if self._source.runs_here:
            # Forked workers must not inherit files that the dataset opens when it is first asked.
            self._open_others()
        self._clear()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        now = self._clock()
        self.witness.leave()
        if self._returned_at is not None:
            self._step_s += now - self._returned_at
            self._batches += 1
        self._advance(now)
        began = self._clock()
        try:
            batch = self._next_batch()
        finally:
            self._returned_at = self._clock()
            if self._source.startup_s is not None and not self._has_started:
                self._has_started = True
                self._began = self._returned_at  # however long its workers took to start
            self._wait_s += self._returned_at - began
        if self._turn == 0 and _WARM <= self._warmed < _WARM + _LOOKS:
            self.witness.enter()
        return batch

    def trials(self) -> tuple[Trial, ...]:
        """Return what has been seen of every source."""
        return tuple(
            Trial(
                name=source.name,
                line=source.line,
                stretches=tuple(self._stretches.get(source.name, ())),
                startup_s=source.startup_s,
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
    def _source(self) -> Source:
        return self._alive[self._turn % len(self._alive)]

    @property
    def _alive(self) -> list[Source]:
        return [source for source in self._sources if source.is_live]

    def _clear(self) -> None:
        self._stretch_began = self._clock()
        self._batches, self._wait_s, self._step_s = 0, 0.0, 0.0

    def _advance(self, now: float) -> None:
        """Go on to the next stretch where this one is over, and end the loop after the last."""
        if self._turn == 0:
            self._warm_up(now)
            return
        if now - self._stretch_began < self._stretch_s or not self._batches:
            return
        self._keep(now)
        if now - self._began > self._seconds:
            raise EnoughError
        turn = self._turn + 1
        if turn % len(self._alive) == 0:
            self._drop_the_hopeless()
            turn = len(self._alive)
        self._go_to(turn)

    def _warm_up(self, now: float) -> None:
        """See to it that the loop as it is has run for a little while, before anything counts."""
        if self._returned_at is None:
            self._go_to(0)
            return
        self._warmed += 1
        spent = now - self._began
        enough = self._warmed >= _WARM + _LOOKS and spent > self._seconds / 10
        if not enough and spent < self._seconds / 4:
            return
        if not self._source.runs_here:
            self._open_others()
        self._give_the_batch()
        left = self._seconds - (self._clock() - self._began)
        self._stretch_s = max(_LEAST_STRETCH_S, left / (len(self._alive) * 5))
        self._go_to(len(self._alive))  # the first of all again

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

    def _open_others(self) -> None:
        """Start all other sources side by side, and let each come into step before it is stopped."""
        self._alive[0].pause()  # or it would run ahead meanwhile
        others = self._affordable()
        for source in others:
            source.open()
        for source in others:
            self._try_to_warm(source)
            source.pause()

    def _affordable(self) -> list[Source]:
        """Return the other sources, only the first of them where starting workers takes long (a spawned one: seconds)."""
        others = self._alive[1:]
        startup_s = self._alive[0].startup_s or 0.0
        if self._alive[0].runs_here or startup_s < self._seconds * _SLOW_START:
            return others
        count = int(self._seconds * _READY / startup_s)
        starting = [source for source in others if source.starts_processes]
        for source in starting[count:]:
            source.retire()
        return [source for source in others if source.is_live]

    def _try_to_warm(self, source: Source) -> None:
        if self._clock() - self._began > self._seconds * _READY:
            source.retire()
            return
        try:
            source.warm()
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

    def _go_to(self, turn: int) -> None:
        self._source.pause()
        self._turn = turn
        source = self._source
        source.resume()
        if turn > 0:
            self._settle(source)
        self._returned_at = None
        if source.name == AS_IT_IS:
            self.crew.begin(source.workers())
        self._clear()

    def _settle(self, source: Source) -> None:
        """Take away what a source had made ahead before its first turn."""
        if source.is_settled:
            return
        source.is_settled = True
        try:
            for _ in range(source.ahead):
                began = self._clock()
                source.next_batch()
                if self._clock() - began > _AT_ONCE_S:
                    break
        except Exception as error:
            source.fail(error)
            self._go_to(self._turn)

    def _next_batch(self) -> Any:
        while True:
            source = self._source
            try:
                batch = source.next_batch()
            except Exception as error:
                if source.name == AS_IT_IS:
                    raise
                source.fail(error)
                self._go_to(self._turn)
                continue
            if self.batch is None:
                self.batch = batch
            return batch


class _Watched:
    """What a program gets for `iter(loader)`: the loader's own iterator, or the conductor once it is this loop's turn."""

    def __init__(self, conductor: Conductor, loader: DataLoader[Any]) -> None:
        self._conductor = conductor
        self._loader = loader
        self._own: Any = None
        self._began: float | None = None

    def __iter__(self) -> _Watched:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        conductor = self._conductor
        if conductor.loader is None and self._is_it():
            self._own = None
            conductor.begin(self._loader)
        if conductor.loader is self._loader:
            if self._own is None:
                self._own = conductor
                conductor.beginnings += 1
            conductor.asked += 1
            return next(conductor)
        if self._own is None:
            self._own = iterate(self._loader)
        return next(self._own)

    def _is_it(self) -> bool:
        """Say whether this is the training loop: gradients are on; or it is a long one without them."""
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        return torch.is_grad_enabled() or now - self._began > _PASSIVE_S


@contextmanager
def conducted(conductor: Conductor) -> Iterator[None]:
    """Let `conductor` feed the first training loop over any DataLoader, torch's or one derived from it."""

    def watch(loader: DataLoader[Any]) -> Any:
        return _Watched(conductor, loader)

    DataLoader.__iter__ = watch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]
