"""Gathering: the gradients of a window of batches, computed again and again until they are complete.

An attempt that fails leaves no trace: gradients are dropped, buffers and random states are put back, and the whole
window is gathered again, once as it was (memory may have been short for a moment), then in smaller parts. Keeping the
batches is cheaper than keeping a second set of gradients.

What losses are to be divided by is the weight of the whole window, which is known only in the end; so they are first
divided by `guess`, and whoever uses the gradients corrects them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory import microbatch
from penstock.memory.autocast import Autocast
from penstock.memory.buffers import Buffers
from penstock.memory.coupled import Allowed, coupled_layers, coupled_words
from penstock.memory.explain import OutOfMemoryError, explain
from penstock.memory.failure import Failure, FailureLog, attempt, insist, let_go
from penstock.memory.headroom import headroom_of
from penstock.memory.holdings import LossFunction, accelerators_of, drop_gradients
from penstock.memory.microbatch import Sizes, Split
from penstock.memory.random_state import RandomState
from penstock.memory.shards import Shards, ShortageError

_PUTTING_BACK = "restoring what a failed attempt had changed"


@dataclass(slots=True, eq=False)
class _Entry:
    """A batch of the window."""

    batch: Any
    size: int
    bucket: tuple[Any, ...]
    before: RandomState
    continues: bool
    """Whether nothing was drawn between the batch before it in the window and this one."""
    after: RandomState | None = None
    loss: Tensor | None = None
    """The sum of its losses, detached."""
    weight: Any = 0
    parts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Micro:
    """How a batch is cut, and how its parts are run."""

    loss_fn: LossFunction
    split: Split
    batch_size: Callable[[Any], int]
    may_couple: Allowed
    autocast: Autocast
    scaler: torch.amp.GradScaler | None


class Gathering:
    """The window of one TrainStep.

    Args:
        model: what this rank runs.
        optimizer: whose gradients are gathered.
        micro: how.
        accumulate: batches in a window.
        log: takes note of every failure survived.
        shards: the ranks that have parts of the model, if there are any.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        micro: Micro,
        *,
        accumulate: int,
        most: int | None,
        log: FailureLog,
        shards: Shards | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._micro = micro
        self._accumulate = accumulate
        self._log = log
        self._shards = shards
        self._devices = accelerators_of(model)
        self._buffers = Buffers(model)
        self._window: list[_Entry] = []
        self._gathered = 0
        """How many batches of the window the gradients hold."""
        self._is_replay = False
        self._spare: Any = None
        """Samples that were run before, of a sharded model."""
        self.sizes = Sizes(most)
        self.headroom = headroom_of(self._devices)
        self.guess = 1.0
        """What losses are divided by."""
        self.is_guess_shared = False
        """Whether it was settled with other ranks; else it is guessed anew for each window."""
        self.micro_batch: int | None = None
        """Samples in the largest part of the last batch."""

    def __len__(self) -> int:
        return len(self._window)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients are those of all batches of the window."""
        return self._gathered == len(self._window)

    @property
    def last_size(self) -> int:
        """Samples in the last batch of the window; 0 of none."""
        return self._window[-1].size if self._window else 0

    def add(self, batch: Any) -> None:
        """Let the window have another batch; None for a rank that has none left."""
        before = RandomState.now(self._devices)
        self._window.append(
            _Entry(
                batch,
                0 if batch is None else self._micro.batch_size(batch),
                microbatch.bucket_of(batch),
                before,
                continues=bool(self._window) and before == self._window[-1].after,
            )
        )

    def run(self) -> Tensor:
        """Add to the gradients what they lack of the window, again and again until that succeeds.

        Returns:
            The mean loss of the last batch.

        Raises:
            OutOfMemoryError: a single sample does not fit, or what changes the result must not be cut.
            RankError: another rank has given up.
        """
        retried: set[int] = set()
        while True:
            is_done, failure = self._attempt()
            if is_done:
                return self._mean_loss()
            self._refuse_broken(failure)
            if failure is not None:
                self._log.note(failure)
            entry = self._window[min(self._gathered, len(self._window) - 1)]
            self.undo()
            if failure is None:
                continue
            size = -(-entry.size // entry.parts)
            if size in retried and entry.parts == 1:
                self._refuse_coupled(failure)
            if not self.sizes.shrink(entry.bucket, size, retried):
                raise OutOfMemoryError(self.explained(failure))

    def undo(self) -> None:
        """Undo what the window's attempts have changed, so that it is gathered anew."""
        self.insist(self._undo, _PUTTING_BACK)

    def abandon_last(self) -> None:
        """Leave the window as if its last batch had never been there."""
        entry = self._window[-1]
        try:
            self.undo()
        finally:
            entry.before.restore()
            self._window.remove(entry)

    def give_up(self) -> None:
        """Drop the whole window, and what it has changed."""
        if self._window:
            self.undo()
        self._window.clear()
        self._gathered = 0

    def close(self) -> int:
        """Begin a new window, now that this one's gradients were used; return how many batches it had."""
        count = len(self._window)
        self._window.clear()
        self._gathered = 0
        self._buffers.forget()
        return count

    def weights(self) -> list[Any]:
        """Return the weight of each batch."""
        return [entry.weight for entry in self._window]

    def learned(self) -> float:
        """Return the most samples that a part is believed to have room for, of the window's batches."""
        return min(self.sizes.learned(entry.bucket) for entry in self._window)

    def insist(self, body: Callable[[], object], what: str) -> None:
        """Do what takes no memory, or hardly any, and may be done again.

        Raises:
            OutOfMemoryError: not even then did it go through.
        """
        failure = insist(body, self._log)
        if failure is not None:
            raise OutOfMemoryError(f"{what}: {self.explained(failure)}")

    def explained(self, failure: Failure) -> str:
        """Return `failure` in words, with what would have helped."""
        step = (self.loss_on_cpu, self._window[-1].batch) if self._window else None
        return explain(failure, self._model, self._optimizer, step)

    def loss_on_cpu(self, model: nn.Module, part: Any) -> tuple[Tensor, Any]:
        """Compute a loss in the precision of the step, for a plan, which is made on the CPU."""
        with self._micro.autocast.on_cpu():
            return self._micro.loss_fn(model, part)

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self) -> tuple[bool, Failure | None]:
        """Try once; return whether that went through, and if not, what failed here (None: another rank's memory)."""
        try:
            failure = attempt(self._add_missing).failure
            return failure is None, failure
        except ShortageError as error:
            shortage = error
        let_go(shortage)
        return False, shortage.failure

    def _add_missing(self) -> None:
        """Run forward and backward for what the gradients lack."""
        if self._gathered == 0:
            self._begin()
        for number in range(self._gathered, len(self._window)):
            entry = self._window[number]
            if self._is_replay and (number == 0 or not entry.continues):
                # Others go on from where their predecessor ends, which is elsewhere when it was cut otherwise.
                entry.before.restore()
            if self._shards is not None:
                self._run_on_all(entry, self._shards)
            elif entry.batch is not None:
                entry.parts = self._parts(entry)
                self._run(entry)
            if entry.batch is not None:
                self.micro_batch = -(-entry.size // entry.parts)
                self.sizes.succeeded(entry.bucket, self.micro_batch)
            if self._accumulate > 1:
                entry.after = RandomState.now(self._devices)
            self._gathered += 1
        self._is_replay = False

    def _mean_loss(self) -> Tensor:
        """Return the mean loss of the last batch."""
        found: list[Tensor] = []

        def divide() -> None:
            entry = self._window[-1]
            found[:] = [torch.zeros(()) if entry.loss is None else _ratio(entry.loss, entry.weight)]

        self.insist(divide, "dividing the loss")
        return found[0]

    def _begin(self) -> None:
        drop_gradients(self._optimizer)
        self._buffers.save()
        if not self.is_guess_shared:
            self.guess = float(max(1, self._window[0].size) * self._accumulate)

    def _parts(self, entry: _Entry) -> int:
        parts = 1
        if entry.batch is not None:
            parts = self.sizes.parts(entry.bucket, entry.size)
            if self._shards is not None:  # whose out-of-memory costs all ranks their step
                parts = max(parts, math.ceil(entry.size / self.headroom.most(entry.bucket)))
        if parts > 1:
            self._refuse_coupled(None)
        return parts

    def _run(self, entry: _Entry) -> None:
        entry.loss, entry.weight = None, 0
        for part in self._cut(entry):
            self._run_part(entry, part, self.guess)

    def _run_on_all(self, entry: _Entry, shards: Shards) -> None:
        """Run a batch on all ranks of a sharded model, in as many parts everywhere."""
        entry.loss, entry.weight = None, 0
        entry.parts = shards.parts(self._parts(entry))
        if entry.parts > 1:
            self._refuse_coupled(None)
        own: list[Any] = []
        for number in range(entry.parts):
            with self.headroom.measuring(entry.bucket, -(-entry.size // entry.parts)):
                shards.micro_batch(functools.partial(self._run_shared, entry, own, number, self.guess / shards.size))
        self._spare = own[-1] if own else self._spare

    def _run_shared(self, entry: _Entry, own: list[Any], number: int, divisor: float) -> None:
        """Run this rank's part of a micro-batch; all that may fail is done here, where the others are told of it."""
        if entry.batch is not None and not own:
            own.extend(self._cut(entry))
        if number < len(own):
            self._run_part(entry, own[number], divisor)
        else:
            self._run_nothing()

    def _cut(self, entry: _Entry) -> Sequence[Any]:
        return self._micro.split(entry.batch, entry.parts) if entry.parts > 1 else [entry.batch]

    def _run_part(self, entry: _Entry, part: Any, divisor: float) -> None:
        with self._micro.autocast():
            found, count = _checked(self._micro.loss_fn(self._model, part))
        scaled = found / divisor
        (scaled if self._micro.scaler is None else self._micro.scaler.scale(scaled)).backward()
        loss, weight = found.detach(), count.detach() if isinstance(count, Tensor) else count
        entry.loss = loss if entry.loss is None else entry.loss + loss
        entry.weight = entry.weight + weight

    def _run_nothing(self) -> None:
        """Meet the others in a micro-batch for which this rank has no samples left: with earlier ones, times zero."""
        if self._spare is None:
            raise OptionError("the first batch of a sharded model has to have samples on every rank")
        before = RandomState.now(self._devices)
        buffers = Buffers(self._model)
        buffers.save()
        with self._micro.autocast():
            found, _ = self._micro.loss_fn(self._model, self._spare)
        (found * 0).backward()
        buffers.restore()
        before.restore()

    def _undo(self) -> None:
        drop_gradients(self._optimizer)
        self._buffers.restore()
        self._window[0].before.restore()
        self._gathered = 0
        self._is_replay = True
        if self._shards is not None and self._shards.can_reset():
            self._shards.reset()
        scaler = self._micro.scaler
        if scaler is not None and scaler._growth_tracker is None:
            scaler._scale = None  # made half: it would never make the other half

    def _refuse_broken(self, failure: Failure | None) -> None:
        """Refuse to go on with a sharded model that was left in the middle, where torch cannot put it right."""
        if self._shards is None or self._shards.can_reset():
            return
        if failure is None:
            self._shards.hear()
            return
        raise OutOfMemoryError(
            f"{self.explained(failure)}\nIt happened inside of a sharded model, which torch {torch.__version__} cannot "
            "go on with (2.13 can); begin with a smaller micro_batch="
        )

    def _refuse_coupled(self, failure: Failure | None) -> None:
        """Refuse to cut a batch where that changes the result and nobody has said that it may."""
        coupled = coupled_layers(self._model, self._micro.may_couple)
        if not coupled:
            return
        if failure is None:
            raise OptionError(f"this batch would be cut into micro-batches, and {coupled_words(coupled)}")
        raise OutOfMemoryError(f"{self.explained(failure)}\nThe batch was not cut: {coupled_words(coupled)}.")


def _checked(found: Any) -> tuple[Tensor, Any]:
    if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[0], Tensor) and found[1] is not None:
        return found[0], found[1]
    raise OptionError(
        "loss_fn must return two things, the sum of the losses as a tensor and how many they are (samples or tokens), "
        f"not {found!r}"
    )


def _ratio(loss: Tensor, weight: Any) -> Tensor:
    """Return the mean loss; 0 of nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(loss), loss / weight)
    return loss / weight if weight else torch.zeros_like(loss)
