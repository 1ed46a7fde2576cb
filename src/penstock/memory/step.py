"""TrainStep: one optimizer step per batch, whatever happens to memory on the way.

    gather ──▶ commit ──▶ (the next batch)
     │  ▲        │  ▲
     └──┘        └──┘     an out-of-memory: what it held is freed, what it changed is put back, and it is tried again

**Gather** computes the gradients of a window: of one batch, or of `accumulate` batches. Each batch is cut into
micro-batches; forward and backward of all of them make the gradients. An attempt that fails leaves no trace: gradients
are dropped, buffers and random states are put back, and the whole window is gathered again, once as it was (memory may
have been short for a moment), then in smaller parts.

**Commit** divides the gradients, clips them and steps the optimizer. A failure there is tried again and never shrinks a
batch. When it begins, the gradients are complete; when it ends, exactly one step has been taken.

What a loss is divided by is the weight of the whole window, over all of its batches and ranks. It is known only
when the window is gathered, so gradients are first divided by a guess (the number of samples) and corrected in the end.
Where the guess was right, which is the rule for a mean over samples, nothing is left to correct.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError, RankError
from penstock.distributed import peers_of
from penstock.memory import microbatch
from penstock.memory.commit import Commit, StageError, TornError
from penstock.memory.coupled import coupled_layers
from penstock.memory.explain import OutOfMemoryError, explain
from penstock.memory.failure import Failure, FailureLog, attempt, insist
from penstock.memory.microbatch import Sizes, Split, split_batch
from penstock.memory.planner import plan
from penstock.memory.resume import TornStepError
from penstock.memory.snapshot import Buffers, RandomState
from penstock.memory.together import Together
from penstock.memory.transaction import StepTransaction

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""`(model, batch) -> (sum of losses, how many they are)`."""


class _Phase(Enum):
    GATHER = "gather"
    COMMIT = "commit"


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
class StepStatistics:
    """A snapshot of what a TrainStep has met so far."""

    steps: int
    """Optimizer steps taken."""

    batches: int
    """Batches that took part in them."""

    out_of_memory: int
    """Failures survived."""

    skipped: int
    """Steps that the GradScaler left out because of infinite gradients."""

    micro_batch: int | None
    """Samples in the largest part of the last batch; None before the first one."""

    last_failure: Failure | None
    """The latest failure survived."""


class TrainStep:
    """A training step that survives out-of-memory with the same gradients.

    Args:
        model: on its device. A DistributedDataParallel model is stepped on all ranks together.
        optimizer: any of torch's that needs no closure.
        loss_fn: `(model, batch) -> (loss_sum, weight)`: a sum over samples or tokens, and their count. The gradient
            is that of the sum of all sums divided by the sum of all counts, however a batch is cut.
        micro_batch: the most samples that go through the model at once: a number, None for as many as the batch has,
            or "auto" for as many as `plan` says fit `budget`, found out with the first batch. In any case memory that
            runs out makes the parts smaller, for batches of that shape.
        budget: for "auto": as in "70GiB", or bytes; the accelerator's free memory by default, no limit without one.
        accumulate: batches per optimizer step.
        scaler: a `torch.amp.GradScaler`.
        autocast: a dtype, or arguments of `torch.autocast`, under which `loss_fn` runs.
        clip_grad_norm: the largest norm of all gradients together.
        scheduler: stepped after each optimizer step (not after one that the scaler skipped).
        after_step: called after each optimizer step: for a moving average of the weights, say.
        split: `(batch, parts) -> batches`, for batches that `split_batch` cannot cut.
        batch_size: `batch -> samples`, likewise.
        batch_coupled: classes or qualified names of layers whose result for a sample depends on the others of its
            micro-batch (BatchNorm in training), that are all right with smaller ones.

    Raises:
        OptionError: arguments that cannot work together.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     x, y = batch
        ...     return nn.functional.mse_loss(model(x), y, reduction="sum"), len(x)
        >>> step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=2)
        >>> loss = step((torch.ones(5, 3), torch.zeros(5, 1)))
        >>> isinstance(loss.item(), float), step.statistics().micro_batch
        (True, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        *,
        micro_batch: int | Literal["auto"] | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | dict[str, Any] | None = None,
        clip_grad_norm: float | None = None,
        scheduler: Any = None,
        after_step: Callable[[], object] | Sequence[Callable[[], object]] = (),
        split: Split = split_batch,
        batch_size: Callable[[Any], int] = microbatch.batch_size,
        batch_coupled: Sequence[str | type[nn.Module]] = (),
        budget: str | int | None = None,
    ) -> None:
        _check(optimizer, micro_batch, accumulate)
        self.model = model
        self.optimizer = optimizer
        self._inner, peers = peers_of(model)
        self._loss_fn = loss_fn
        self._accumulate = accumulate
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip_grad_norm
        self._scheduler = scheduler
        self._after_step = (after_step,) if callable(after_step) else tuple(after_step)
        self._split = split
        self._batch_size = batch_size
        self._may_couple = tuple(batch_coupled)
        self._devices = sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)
        self._autocast = _autocast(autocast, self._devices)
        self._sizes = Sizes(micro_batch if isinstance(micro_batch, int) else None)
        self._is_to_plan = micro_batch == "auto" and (budget is not None or bool(self._devices))
        self._budget = budget
        self._buffers = Buffers(self._inner)
        self._log = FailureLog()
        self._transaction = StepTransaction(optimizer, log=self._log)
        self._phase = _Phase.GATHER
        self._window: list[_Entry] = []
        self._gathered = 0
        """How many batches of the window the gradients hold."""
        self._is_replay = False
        self._guess = 1.0
        self._has_guessed = False
        self._total_weight = 0.0
        self._commit: Commit | None = None
        self._together = None if peers is None else Together(peers, optimizer)
        self._steps = self._batches = self._skipped = 0
        self._micro_batch: int | None = None

    def __call__(self, batch: Any) -> Tensor:
        """Train on `batch`; every `accumulate` batches, step the optimizer.

        Returns:
            The weighted mean of the batch's losses: detached, without dimensions, on the model's device.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the optimizer's step does not. The batch has had no
                effect then.
        """
        if self._phase is _Phase.COMMIT:
            self._commit_window()  # a step that failed for good, and was caught; its gradients are complete
        if self._is_to_plan and batch is not None:
            self._plan_sizes(batch)
        try:
            self._window.append(self._entry(batch))
            self._guess_together()
            try:
                loss = self._gather()
            except BaseException:
                self._abandon(self._window[-1])
                raise
        except Exception as error:
            self._fail_together(error)
            raise
        if len(self._window) == self._accumulate:
            self._phase = _Phase.COMMIT
            self._commit_window()
        return loss

    def flush(self) -> bool:
        """Step with the batches gathered so far, if there are any: the end of an epoch, say. Returns whether it did.

        Of a parallel model, on all ranks.
        """
        if not self._window:
            return False
        if self._phase is _Phase.GATHER and self._gathered < len(self._window):
            try:
                self._gather()
            except Exception as error:
                self._fail_together(error)
                raise
        self._phase = _Phase.COMMIT
        self._commit_window()
        return True

    def statistics(self) -> StepStatistics:
        """Return what has been met so far."""
        return StepStatistics(
            steps=self._steps,
            batches=self._batches,
            out_of_memory=self._log.count,
            skipped=self._skipped,
            micro_batch=self._micro_batch,
            last_failure=self._log.last,
        )

    def _guess_together(self) -> None:
        """Guess the weight of the first window of all ranks; later ones are guessed to have that of the one before."""
        if self._together is not None and not self._has_guessed:
            own = self._window[-1].size if self._window else 0
            self._guess = max(1.0, self._together.total(own) * self._accumulate)
            self._has_guessed = True

    def _fail_together(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on; all drop the window."""
        if self._together is not None and not isinstance(error, RankError):
            self._guess_together()
            self._together.fail(error)
            self._give_up_window()

    def _give_up_window(self) -> None:
        """Drop the whole window, as all ranks do when one cannot go on."""
        if self._window:
            self._insist(self._undo, "restoring what a failed attempt had changed")
        self._window.clear()
        self._phase = _Phase.GATHER

    def _plan_sizes(self, batch: Any) -> None:
        """Begin with as many samples at once as fit the budget, by the plan's reckoning."""
        self._is_to_plan = False

        def loss_fn(model: nn.Module, part: Any) -> tuple[Tensor, Any]:
            with self._autocast():
                return self._loss_fn(model, part)

        found = plan(
            self._inner, loss_fn, batch, self.optimizer, budget=self._budget, split=self._split, modes=("plain",)
        )
        least = min(found.ways, key=lambda way: way.peak_nbytes)
        self._sizes = Sizes((found.choice or least).micro_batch)

    def _entry(self, batch: Any) -> _Entry:
        before = RandomState.now(self._devices)
        return _Entry(
            batch,
            0 if batch is None else self._batch_size(batch),
            microbatch.bucket_of(batch),
            before,
            continues=bool(self._window) and before == self._window[-1].after,
        )

    # ── gather ──────────────────────────────────────────────────────────────────────────────────────────────

    def _gather(self) -> Tensor:
        """Add to the gradients what they lack of the window, again and again until that succeeds."""
        retried: set[int] = set()
        while True:
            outcome = attempt(self._add_missing)
            if outcome.failure is None:
                assert outcome.value is not None
                return outcome.value
            entry = self._window[min(self._gathered, len(self._window) - 1)]
            self._start_over(outcome.failure)
            size = -(-entry.size // entry.parts)
            if size in retried and entry.parts == 1:
                self._refuse_coupled(outcome.failure)
            if not self._sizes.shrink(entry.bucket, size, retried):
                raise OutOfMemoryError(self._explained(outcome.failure))

    def _add_missing(self) -> Tensor:
        """Run forward and backward for what the gradients lack; return the last batch's mean loss."""
        if self._gathered == 0:
            self._begin_window()
        entry = self._window[-1]
        for number in range(self._gathered, len(self._window)):
            entry = self._window[number]
            if self._is_replay and (number == 0 or not entry.continues):
                # Others go on from where their predecessor ends, which is elsewhere when it was cut otherwise.
                entry.before.restore()
            if entry.batch is not None:
                entry.parts = self._sizes.parts(entry.bucket, entry.size)
                if entry.parts > 1:
                    self._refuse_coupled(None)
                self._run(entry)
                self._micro_batch = -(-entry.size // entry.parts)
                self._sizes.succeeded(entry.bucket, self._micro_batch)
            if self._accumulate > 1:
                entry.after = RandomState.now(self._devices)
            self._gathered += 1
        self._is_replay = False
        return torch.zeros(()) if entry.loss is None else _ratio(entry.loss, entry.weight)

    def _begin_window(self) -> None:
        self._drop_gradients()
        self._buffers.save()
        if self._together is None:
            self._guess = float(max(1, self._window[0].size) * self._accumulate)

    def _run(self, entry: _Entry) -> None:
        loss, weight = None, None
        parts = self._split(entry.batch, entry.parts) if entry.parts > 1 else [entry.batch]
        for part in parts:
            with self._autocast():
                part_sum, part_weight = self._loss_fn(self._inner, part)
            scaled = part_sum / self._guess
            (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
            found, count = part_sum.detach(), part_weight.detach() if isinstance(part_weight, Tensor) else part_weight
            loss = found if loss is None else loss + found
            weight = count if weight is None else weight + count
        entry.loss, entry.weight = loss, weight

    def _start_over(self, failure: Failure) -> None:
        """Undo what the window's attempts have changed."""
        self._log.note(failure)
        self._insist(self._undo, "restoring what a failed attempt had changed")

    def _undo(self) -> None:
        self._drop_gradients()
        self._buffers.restore()
        self._window[0].before.restore()
        self._gathered = 0
        self._is_replay = True
        if self._scaler is not None and self._scaler._growth_tracker is None:
            self._scaler._scale = None  # made half: it would never make the other half

    def _abandon(self, entry: _Entry) -> None:
        """Leave the window as if `entry` had never been there."""
        if self._phase is _Phase.COMMIT:
            return
        try:
            self._insist(self._undo, "restoring what a failed attempt had changed")
        finally:
            entry.before.restore()
            self._window.remove(entry)

    def _drop_gradients(self) -> None:
        """Do what `optimizer.zero_grad` does, without the operations that it takes to note that in a profile."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    def _refuse_coupled(self, failure: Failure | None) -> None:
        """Refuse to cut a batch where that changes the result and nobody has said that it may."""
        coupled = coupled_layers(self._inner, self._may_couple)
        if not coupled:
            return
        name, layer = coupled[0]
        words = (
            f"{type(layer).__name__} ({name!r}{f' and {len(coupled) - 1} more' if len(coupled) > 1 else ''}) computes "
            "over the samples of a micro-batch, so smaller ones give another result; allow it with "
            f"batch_coupled=({type(layer).__name__!r},), or use a batch that fits"
        )
        if failure is None:
            raise OptionError(f"this batch would be cut into micro-batches, and {words}")
        raise OutOfMemoryError(f"{self._explained(failure)}\nThe batch was not cut: {words}.")

    def _explained(self, failure: Failure) -> str:
        entry = self._window[-1] if self._window else None
        step = None if entry is None else (self._loss_fn, entry.batch)
        return explain(failure, self._inner, self.optimizer, step)

    def _insist(self, body: Callable[[], None], what: str) -> None:
        """Do what takes no memory, or hardly any, and may be done again."""
        failure = insist(body)
        if failure is not None:
            raise OutOfMemoryError(f"{what}: {self._explained(failure)}")

    # ── commit ──────────────────────────────────────────────────────────────────────────────────────────────

    def _commit_window(self) -> None:
        while True:
            try:
                if self._commit is None:
                    self._agree()
                    self._insist(self._prepare_commit, "adding up the weights of a batch")
                assert self._commit is not None
                self._commit.run()
                break
            except TornError:
                self._gather_anew()
            except TornStepError as error:
                raise OutOfMemoryError(
                    f"the optimizer's step failed in its middle ({error}), and its weights and moments are "
                    "inconsistent now; go back to a checkpoint, with a new TrainStep"
                ) from error
            except StageError as error:
                raise OutOfMemoryError(
                    f"{error.stage}: {self._explained(error.failure)}\n"
                    "The gradients are complete; the next call goes on from there."
                ) from None
        self._close_window(stepped=self._commit.stepped)

    def _gather_anew(self) -> None:
        """Compute gradients again that a failure has left changed in part."""
        if self._together is not None:
            raise OutOfMemoryError(
                "memory ran out while the gradients of all ranks were being divided or clipped, and they cannot be "
                "computed again on this rank alone; go back to a checkpoint"
            )
        self._commit = None
        self._insist(self._undo, "restoring what a failed attempt had changed")
        self._gather()

    def _close_window(self, *, stepped: bool) -> None:
        self._commit, self._phase = None, _Phase.GATHER
        if self._together is not None and self._total_weight:
            self._guess = self._total_weight
        self._batches += len(self._window)
        self._window.clear()
        self._gathered = 0
        self._buffers.forget()
        self._steps += stepped
        self._skipped += not stepped
        if self._together is not None:
            self._together.share_buffers(self._inner)
        if stepped:
            if self._scheduler is not None:
                self._scheduler.step()
            for call in self._after_step:
                call()

    def _agree(self) -> None:
        """Settle the step with the other ranks, if there are any; no rank gets here but with its gradients."""
        if self._together is None:
            return
        learned = min(self._sizes.learned(entry.bucket) for entry in self._window)
        try:
            self._insist(self._sum_weights, "adding up the weights of a batch")
            found = self._together.agree(self._total_weight, learned)
        except RankError:
            self._give_up_window()
            raise
        except OutOfMemoryError as error:
            self._fail_together(error)
            raise
        self._total_weight = found.weight
        self._sizes.impose(found.micro_batch)

    def _sum_weights(self) -> None:
        self._total_weight = sum((float(entry.weight) for entry in self._window), 0.0)

    def _prepare_commit(self) -> None:
        weight: Any = self._total_weight
        if self._together is None:
            weight = self._window[0].weight
            for entry in self._window[1:]:
                weight = weight + entry.weight
        self._commit = Commit(
            self._transaction,
            factor=_factor(self._guess, weight),
            scaler=self._scaler,
            clip_grad_norm=self._clip,
            log=self._log,
        )


def _factor(guess: float, weight: Any) -> float | Tensor:
    """Return what turns gradients of sum / guess into those of sum / weight; without weight there is no gradient."""
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return torch.where(weight == 0, 0.0, guess / weight)
    weight = float(weight)
    return guess / weight if weight else 0.0


def _ratio(loss: Tensor, weight: Any) -> Tensor:
    """Return the mean loss; 0 of nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, torch.zeros_like(loss), loss / weight)
    return loss / weight if weight else torch.zeros_like(loss)


def _check(optimizer: Optimizer, micro_batch: int | Literal["auto"] | None, accumulate: int) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("LBFGS evaluates the loss by itself, several times per step; use an optimizer that does not")
    if isinstance(micro_batch, str) and micro_batch != "auto":
        raise OptionError(f"micro_batch must be a number of samples, 'auto' or None, not {micro_batch!r}")
    if isinstance(micro_batch, int) and micro_batch < 1:
        raise OptionError(f"micro_batch must be at least 1, not {micro_batch}")
    if accumulate < 1:
        raise OptionError(f"accumulate must be at least 1 batch, not {accumulate}")


def _autocast(
    wanted: torch.dtype | dict[str, Any] | None, devices: list[torch.device]
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    if wanted is None:
        return contextlib.nullcontext
    options: dict[str, Any] = {"dtype": wanted} if isinstance(wanted, torch.dtype) else dict(wanted)
    options.setdefault("device_type", devices[0].type if devices else "cpu")
    return functools.partial(torch.autocast, **options)
