"""TrainStep: one optimizer step per batch, whatever happens to memory on the way.

    gather ──▶ commit ──▶ (the next batch)
     │  ▲        │  ▲
     └──┘        └──┘     an out-of-memory: what it held is freed, what it changed is put back, and it is tried again

**Gather** (`gather.py`) computes the gradients of a window: of one batch, or of `accumulate` batches. Each batch is cut
into micro-batches; forward and backward of all of them make the gradients. An attempt that fails leaves no trace.

**Commit** (`commit.py`) divides the gradients, clips them and steps the optimizer. A failure there is tried again and
never shrinks a batch. When it begins, the gradients are complete; when it ends, exactly one step has been taken.

What a loss is divided by is the weight of the whole window, over all of its batches and ranks. It is known only
when the window is gathered, so gradients are first divided by a guess (the number of samples) and corrected in the end.
Where the guess was right, which is the rule for a mean over samples, nothing is left to correct.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError, RankError
from penstock.distributed.peers import is_sharded, peers_of
from penstock.memory import microbatch
from penstock.memory.autocast import Autocast
from penstock.memory.commit import Commit, StageError, TornError
from penstock.memory.explain import OutOfMemoryError
from penstock.memory.failure import Failure, FailureLog
from penstock.memory.gather import Gathering, Micro
from penstock.memory.holdings import LossFunction, accelerators_of
from penstock.memory.insist import Insisting
from penstock.memory.microbatch import Split, split_batch
from penstock.memory.planner import plan
from penstock.memory.resume import TornStepError
from penstock.memory.shards import Shards
from penstock.memory.together import Together
from penstock.memory.transaction import StepTransaction, refuse_closure


class _Phase(Enum):
    GATHER = "gather"
    COMMIT = "commit"


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
        model: on its device. One that is DistributedDataParallel, or sharded (FSDP2), is stepped on all ranks together.
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
        budget: str | float | None = None,
    ) -> None:
        _check(optimizer, micro_batch, accumulate, scheduler)
        self.model = model
        self.optimizer = optimizer
        self._inner, peers = peers_of(model)
        self._accumulate = accumulate
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        hooks = (after_step,) if callable(after_step) else tuple(after_step)
        self._afterwards = hooks if scheduler is None else (scheduler.step, *hooks)
        devices = accelerators_of(model)
        self._is_to_plan = micro_batch == "auto" and (budget is not None or bool(devices))
        self._budget = budget
        self._split = split
        self._batch_size = batch_size
        self._log = FailureLog()
        self._transaction = StepTransaction(optimizer, log=self._log)
        self._together: Together | Shards | None = None
        shards: Shards | None = None
        if peers is not None and is_sharded(model):
            _refuse_scaler(self._scaler)
            self._together = shards = Shards(model, peers, optimizer, clip_grad_norm)
        elif peers is not None:
            self._together = Together(peers, optimizer)
        self._clip = None if shards is not None else clip_grad_norm
        self._gathering = Gathering(
            self._inner,
            optimizer,
            Micro(
                loss_fn=loss_fn,
                split=split,
                batch_size=batch_size,
                may_couple=tuple(batch_coupled),
                autocast=Autocast(autocast, devices),
                scaler=self._scaler,
            ),
            accumulate=accumulate,
            most=None if micro_batch is None or isinstance(micro_batch, str) else int(micro_batch),
            log=self._log,
            shards=shards,
        )
        self._phase = _Phase.GATHER
        self._total_weight: Any = 0.0
        self._factor: float | None = None
        self._commit: Commit | None = None
        self._steps = self._batches = self._skipped = 0

    def __call__(self, batch: Any) -> Tensor:
        """Train on `batch`; every `accumulate` batches, step the optimizer.

        Of a parallel model, on all ranks; with None on those that have no batch left.

        Returns:
            The weighted mean of the batch's losses: detached, without dimensions, on the model's device.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the optimizer's step does not. The batch has had no
                effect then.
            RankError: another rank has given up.
        """
        if self._phase is _Phase.COMMIT:
            self._commit_window()  # a step that failed for good, and was caught; its gradients are complete
        if self._is_to_plan and batch is not None and self._batch_size(batch):
            self._plan_sizes(batch)
        gathering = self._gathering
        try:
            gathering.add(batch)
            self._guess_together()
            try:
                loss = gathering.run()
            except BaseException:
                gathering.abandon_last()
                raise
        except Exception as error:
            self._fail_together(error)
            raise
        if len(gathering) == self._accumulate:
            self._phase = _Phase.COMMIT
            self._commit_window()
        return loss

    def flush(self) -> bool:
        """Step with the batches gathered so far, if there are any: the end of an epoch, say. Returns whether it did.

        Of a parallel model, on all ranks.
        """
        if not len(self._gathering):
            return False
        if self._phase is _Phase.GATHER and not self._gathering.is_complete:
            try:
                self._gathering.run()
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
            micro_batch=self._gathering.micro_batch,
            last_failure=self._log.last,
        )

    def _plan_sizes(self, batch: Any) -> None:
        """Begin with as many samples at once as fit the budget, by the plan's reckoning."""
        self._is_to_plan = False
        try:
            found = plan(
                self._inner,
                self._gathering.loss_on_cpu,
                batch,
                self.optimizer,
                budget=self._budget,
                split=self._split,
                batch_size=self._batch_size,
                modes=("plain",),
                verify=False,
            )
        except OptionError:
            raise
        except Exception as error:  # noqa: BLE001  the user's code on fake tensors
            warnings.warn(
                f'micro_batch="auto" begins with whole batches: this step cannot be planned ({error})', stacklevel=3
            )
            return
        least = min(found.ways, key=lambda way: way.peak_nbytes)
        self._gathering.sizes = microbatch.Sizes((found.choice or least).micro_batch)

    # ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────

    def _guess_together(self) -> None:
        """Guess the weight of the first window of all ranks; later ones are guessed to have that of the one before."""
        gathering = self._gathering
        if self._together is not None and not gathering.is_guess_shared:
            gathering.guess = max(1.0, self._together.total(gathering.last_size) * self._accumulate)
            gathering.is_guess_shared = True

    def _fail_together(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot go on; all drop the window."""
        if self._together is None:
            return
        if not isinstance(error, RankError):
            self._guess_together()
            self._together.fail(error)
        self._give_up_window()

    def _give_up_window(self) -> None:
        """Drop the whole window, as all ranks do when one cannot go on."""
        self._gathering.give_up()
        self._phase = _Phase.GATHER

    def _agree(self) -> None:
        """Settle the step with the other ranks, if there are any; no rank gets here but with its gradients."""
        if self._together is None:
            return
        gathering = self._gathering
        try:
            gathering.insist(self._sum_weights, "adding up the weights of a batch")
            if isinstance(self._together, Shards):
                gathering.insist(self._together.measure, "the norm of the gradients")
                found = self._together.agree(self._total_weight, gathering.learned(), gathering.guess)
            else:
                found = self._together.agree(self._total_weight, gathering.learned())
        except RankError:
            self._give_up_window()
            raise
        except OutOfMemoryError as error:
            self._fail_together(error)
            raise
        self._total_weight, self._factor = found.weight, found.factor
        gathering.sizes.impose(found.micro_batch)

    def _sum_weights(self) -> None:
        self._total_weight = sum(map(float, self._gathering.weights()), 0.0)

    # ── commit ──────────────────────────────────────────────────────────────────────────────────────────────

    def _commit_window(self) -> None:
        while True:
            try:
                if not self._gathering.is_complete:
                    self._gathering.run()
                if self._commit is None:
                    self._agree()
                    self._gathering.insist(self._prepare_commit, "adding up the weights of a batch")
                assert self._commit is not None
                self._commit.run()
                break
            except TornError:
                self._drop_torn()
            except TornStepError as error:
                raise OutOfMemoryError(
                    f"the optimizer's step failed in its middle ({error}), and its weights and moments are "
                    "inconsistent now; go back to a checkpoint, with a new TrainStep"
                ) from error
            except StageError as error:
                raise OutOfMemoryError(
                    f"{error.stage}: {self._gathering.explained(error.failure)}\n"
                    "The gradients are complete; the next call goes on from there."
                ) from None
        self._close_window(stepped=self._commit.stepped)

    def _prepare_commit(self) -> None:
        if self._together is None:
            first, *others = self._gathering.weights()
            self._total_weight = sum(others, first)
        self._commit = Commit(
            self._transaction,
            factor=_factor(self._gathering.guess, self._total_weight) if self._factor is None else self._factor,
            scaler=self._scaler,
            clip_grad_norm=self._clip,
            log=self._log,
        )

    def _drop_torn(self) -> None:
        """Drop gradients that a failure has left changed in part, so that they are computed again."""
        if self._together is not None:
            raise OutOfMemoryError(
                "memory ran out while the gradients of all ranks were being divided or clipped, and they cannot be "
                "computed again on this rank alone; go back to a checkpoint"
            )
        self._commit = None
        self._gathering.undo()

    def _close_window(self, *, stepped: bool) -> None:
        self._commit, self._phase = None, _Phase.GATHER
        if self._together is not None:
            if self._total_weight:
                self._gathering.guess = self._total_weight
            self._together.share_buffers(self._inner)
        self._batches += self._gathering.close()
        self._steps += stepped
        self._skipped += not stepped
        if stepped and self._afterwards:
            with Insisting((), self._log):  # what runs afterwards cannot be begun again
                for call in self._afterwards:
                    call()


def _factor(guess: float, weight: Any) -> float | Tensor:
    """Return what turns gradients of sum / guess into those of sum / weight; without weight there is no gradient."""
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return torch.where(weight == 0, 0.0, guess / weight)
    weight = float(weight)
    return guess / weight if weight else 0.0


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def _check(optimizer: Optimizer, micro_batch: int | Literal["auto"] | None, accumulate: int, scheduler: object) -> None:
    refuse_closure(optimizer)
    if micro_batch is not None and micro_batch != "auto" and not _is_count(micro_batch):
        raise OptionError(
            f"micro_batch must be a number of samples, at least 1, or 'auto' or None, not {micro_batch!r}"
        )
    if not _is_count(accumulate):
        raise OptionError(f"accumulate must be a number of batches, at least 1, not {accumulate!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise OptionError("ReduceLROnPlateau is stepped with a metric, which a training step has not; step it yourself")


def _refuse_scaler(scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None:
        raise OptionError(
            "a GradScaler decides on this rank's gradients alone, and those of a sharded model are spread over all; "
            "use bfloat16, which needs no scaler"
        )
