"""GradientAccumulation: the gradients of a window of batches, attempted until they are complete.

A failed attempt leaves no trace: gradients are dropped, buffers and random states are restored, and the whole window is
run again, first as it was (memory may have been short for a moment only), then in smaller micro-batches. Keeping the
batches is cheaper than keeping a second set of gradients.

Losses are to be divided by the weight of the whole window, which is known only in the end. So they are first divided by
`estimated_weight`, and whoever uses the gradients corrects them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.memory.attempts import run_until_it_fits
from penstock.memory.cutting.cut_policy import CutPolicy, RunningBatch
from penstock.memory.explain import explain_failure
from penstock.memory.micro_batch_runner import MicroBatchRunner
from penstock.memory.model_tensors import drop_gradients, drop_input_gradients
from penstock.memory.rank_sync import FsdpSync, ShortageError
from penstock.memory.recovery.out_of_memory import (
    AttemptResult,
    Failure,
    FailureLog,
    OutOfMemoryError,
    attempt,
    clear_frames,
    retry,
)
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.snapshot import ChangedInPlaceError, Snapshot

T = TypeVar("T")

_NUMBERS = (int, float)
"""Types of weights that are known without waiting for a device, beside tensors on the host."""


@dataclass(eq=False, kw_only=True)
class WindowBatch(RunningBatch):
    """A batch of a window."""

    before: RandomState
    continues: bool
    """Whether nothing was drawn between the previous batch of the window and this one."""
    after: RandomState | None = None
    loss: Tensor | None = None
    """The sum of its losses, detached."""
    weight: Any = 0
    mean: Tensor | None = None
    """Its mean loss, once it is known."""

    def mean_loss(self) -> Tensor:
        """Return its mean loss; 0 of nothing. May be called again after it has failed."""
        if self.loss is None:
            return torch.zeros(())
        if isinstance(self.weight, Tensor):
            return torch.where(self.weight == 0, torch.zeros_like(self.loss), self.loss / self.weight)
        return self.loss / self.weight if self.weight else torch.zeros_like(self.loss)

    def reset(self) -> None:
        """Forget the losses of earlier attempts."""
        self.loss, self.weight, self.mean = None, 0, None

    def add(self, loss: Tensor, weight: Any) -> None:
        """Add the losses of a part."""
        self.loss = loss if self.loss is None else self.loss + loss
        self.weight = self.weight + weight


class GradientAccumulation:
    """The window of one TrainStep.

    Args:
        runner: runs micro-batches of the model.
        optimizer: whose gradients are accumulated.
        accumulate: batches in a window.
        log: records every failure survived.
        fsdp: the ranks among which the model is sharded, if it is.
        policy: how batches are cut.
        snapshot: of what an attempt changes.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        optimizer: Optimizer,
        *,
        accumulate: int,
        log: FailureLog,
        fsdp: FsdpSync | None,
        policy: CutPolicy,
        snapshot: Snapshot,
    ) -> None:
        self._runner = runner
        self._optimizer = optimizer
        self.accumulate = accumulate
        self._log = log
        self._fsdp = fsdp
        self.policy = policy
        self._snapshot = snapshot
        self._window: list[WindowBatch] = []
        self._done = 0
        """How many batches of the window the gradients hold."""
        self._is_begun = False
        """Whether what the window changes has been saved."""
        self._is_replay = False
        self._last_part: Any = None
        """A micro-batch that was run before, of a sharded model."""
        self.estimated_weight = 1.0
        """What losses are divided by."""
        self.is_weight_exact = False
        """Whether that is the window's own weight, so that nothing is left to correct."""
        self.is_estimate_shared = False
        """Whether the ranks have agreed on it; else each window has its own."""
        self.micro_batch: int | None = None
        """Samples in the largest part of the last batch."""

    def __len__(self) -> int:
        return len(self._window)

    @property
    def is_full(self) -> bool:
        """Whether the window has all of its batches."""
        return len(self._window) == self.accumulate

    @property
    def is_complete(self) -> bool:
        """Whether the gradients are those of all batches of the window."""
        return self._done == len(self._window)

    @property
    def last_size(self) -> int:
        """Samples in the last batch of the window; 0 without one."""
        return self._window[-1].size if self._window else 0

    # ── the window ──────────────────────────────────────────────────────────────────────────────────────────

    def add(self, batch: Any) -> None:
        """Add a batch to the window; None on a rank that has none left."""
        before = self._snapshot.random_state()
        size = 0 if batch is None else self._runner.cutting.size_of(batch)
        continues = bool(self._window) and before == self._window[-1].after
        self._window.append(WindowBatch(batch, size, before=before, continues=continues))

    def compute(self) -> Tensor:
        """Add to the gradients what they lack of the window, with as many attempts as it takes.

        Returns:
            The mean loss of the last batch.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
            RankError: another rank has given up.
        """
        run_until_it_fits(self.policy, self._attempt, self._running, self.roll_back, self._log)
        mean = self._window[-1].mean
        return self._mean_loss() if mean is None else mean

    def _running(self) -> WindowBatch:
        """The batch that an attempt ended in."""
        return self._window[min(self._done, len(self._window) - 1)]

    def roll_back(self) -> None:
        """Undo what the window's attempts have changed, so that it can be attempted again."""
        try:
            self.retry(self._roll_back, "restoring what a failed attempt had changed")
        except ChangedInPlaceError as error:
            raise OutOfMemoryError(f"memory ran out, and {error}") from None

    def remove_last(self, error: BaseException) -> None:
        """Leave the window as if its last batch, which has ended in `error`, had never been added."""
        last = self._window[-1]
        if last.parts > 1 and "FailOnRecompileLimitHit" in (type(error).__name__, type(error.__cause__).__name__):
            error.add_note(
                "memory had run out, so the model was compiled for micro-batches of other sizes; compile it with "
                "dynamic=True, raise torch._dynamo.config.recompile_limit, or begin with a smaller micro_batch="
            )
        try:
            self.retry(self._roll_back, "restoring what a failed attempt had changed")
        except ChangedInPlaceError as change:
            error.add_note(str(change))
        finally:
            last.before.restore()
            self._window.remove(last)

    def drop(self) -> None:
        """Drop the whole window, and what it has changed."""
        if self._window:
            self.roll_back()
        self._window.clear()
        self._done = 0

    def start_window(self) -> int:
        """Start a new window, after this one's gradients were used; return how many batches it had."""
        count = len(self._window)
        self._window.clear()
        self._done, self._is_begun = 0, False
        self._snapshot.discard()
        return count

    def weights(self) -> list[Any]:
        """Return the weight of each batch."""
        return [one.weight for one in self._window]

    def largest_fitting(self) -> float:
        """Return the largest micro-batch that is believed to fit, for all batches of the window."""
        return min(self.policy.sizes.largest_fitting(one.bucket) for one in self._window)

    def retry(self, body: Callable[[], T], what: str) -> T | None:
        """Return what `body` does, which needs hardly any memory and may be called again until it succeeds.

        Raises:
            OutOfMemoryError: it never does.
        """
        result = retry(body, self._log)
        if result.failure is not None:
            raise OutOfMemoryError(f"{what}: {self.explain(result.failure)}")
        return result.value

    def explain(self, failure: Failure) -> str:
        """Return a text about `failure`, with what would have helped."""
        step = (self._runner.compute_loss_on_cpu, self._window[-1].batch) if self._window else None
        return explain_failure(failure, self._runner.model, self._optimizer, step)

    # ── one attempt ─────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self) -> AttemptResult[None] | None:
        """Try once; return what failed here, if anything did, and None where another rank's memory ran out."""
        try:
            result = attempt(self._add_missing)
        except ShortageError as error:
            shortage = error
        else:
            return result
        clear_frames(shortage)
        self._reject_unresettable_model(shortage.failure)
        return None if shortage.failure is None else AttemptResult(failure=shortage.failure)

    def _add_missing(self) -> None:
        """Run forward and backward of the batches that the gradients lack."""
        if self._done == 0:
            self._begin()
        for number in range(self._done, len(self._window)):
            one = self._window[number]
            if self._is_replay and (number == 0 or not one.continues):
                # A batch that continues takes its random state from the end of the one before, which is another
                # than the first time if that batch is now cut into other parts.
                one.before.restore()
            self._run_batch(one)
            if self.accumulate > 1:
                one.after = self._snapshot.random_state()
            self._done += 1
        self._is_replay = False
        last = self._window[-1]
        if self._fsdp is None and last.mean is None:
            last.mean = last.mean_loss()  # here, within the attempt that there is
        if len(self._window) == self.accumulate:
            self._snapshot.learn()

    def _begin(self) -> None:
        self._is_begun = self.is_weight_exact = False
        drop_gradients(self._optimizer)
        self._snapshot.save(self._window[0].before)
        self._is_begun = True
        if not self.is_estimate_shared:
            self.estimated_weight = float(max(1, self._window[0].size) * self.accumulate)

    def _run_batch(self, one: WindowBatch) -> None:
        if self._fsdp is not None:
            self._run_on_all_ranks(one, self._fsdp)
        elif one.batch is not None:
            one.parts = 1
            one.parts = self.policy.count_parts(one)
            one.reset()
            if one.parts > 1:
                for part in self._runner.cut(one.batch, one.parts):
                    self._run_part(one, part)
            else:
                self._run_part(one, one.batch)
        if one.batch is not None:
            self.micro_batch = one.size if one.parts == 1 else one.micro_batch
            self.policy.record_success(one)

    def _run_part(self, one: WindowBatch, part: Any, divisor: float | None = None) -> None:
        loss, weight = self._runner.compute_loss(part)
        self._runner.reject_mean(loss, weight)
        self._snapshot.find_in_graph(loss)
        is_known = type(weight) in _NUMBERS or (isinstance(weight, Tensor) and weight.device.type == "cpu")
        if is_known and self.accumulate == one.parts == 1 and not self.is_estimate_shared and 0 < weight < math.inf:
            self.estimated_weight, self.is_weight_exact = float(weight), True
        one.add(loss.detach(), weight.detach() if isinstance(weight, Tensor) else weight)
        if one.parts == 1:
            one.mean = one.mean_loss()  # before backward, which leaves nothing in the processor's caches
        self._runner.add_gradients(loss, divisor or self.estimated_weight)

    def _mean_loss(self) -> Tensor:
        """Return the mean loss of the last batch."""
        loss = self.retry(self._window[-1].mean_loss, "dividing the loss")
        assert loss is not None
        return loss

    def _roll_back(self) -> None:
        drop_gradients(self._optimizer)
        for one in self._window:
            drop_input_gradients(one.batch)
        if self._is_begun:
            with contextlib.suppress(ChangedInPlaceError):
                self._snapshot.restore()
        self._window[0].before.restore()
        self._done = 0
        self._is_replay = True
        if self._fsdp is not None and self._fsdp.can_reset():
            self._fsdp.reset()
        self._runner.reset_half_made_scaler()
        if self._is_begun:
            self._snapshot.restore()  # the last: it raises where something cannot be put back

    # ── sharded models ──────────────────────────────────────────────────────────────────────────────────────

    def _run_on_all_ranks(self, one: WindowBatch, fsdp: FsdpSync) -> None:
        """Run a batch of a sharded model, in the same number of parts on every rank."""
        one.reset()
        # An out-of-memory on one rank would cost all ranks their attempt.
        one.parts = fsdp.agree_on_parts(1 if one.batch is None else self.policy.count_parts(one))
        if one.batch is not None:
            self.policy.check(one, one.parts)
        own: list[Any] = []
        divisor = self.estimated_weight / fsdp.size
        for number in range(one.parts):
            fsdp.run_micro_batch(functools.partial(self._run_part_of, one, own, number, divisor))
        self._last_part = own[-1] if own else self._last_part

    def _run_part_of(self, one: WindowBatch, own: list[Any], number: int, divisor: float) -> None:
        """Run this rank's part of a micro-batch. All that may fail happens in here, where the other ranks learn of it.

        A rank that has no samples left meets the others with earlier samples, times zero.
        """
        if one.batch is not None and not own:
            own.extend(self._runner.cut(one.batch, one.parts))
        if number < len(own):
            self._run_part(one, own[number], divisor)
        elif self._last_part is not None:
            self._runner.run_without_effect(self._last_part)
        else:
            raise OptionError("the first batch of a sharded model must have samples on every rank")

    def _reject_unresettable_model(self, failure: Failure | None) -> None:
        """Raise for a sharded model that was interrupted in its middle, where this torch cannot reset it."""
        if self._fsdp is None or self._fsdp.can_reset():
            return
        if failure is None:
            self._fsdp.raise_if_failed()
            return
        raise OutOfMemoryError(
            f"{self.explain(failure)}\nIt happened inside a sharded model, which torch {torch.__version__} cannot "
            "reset (2.13 can); begin with a smaller micro_batch="
        )
