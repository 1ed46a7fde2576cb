"""GradientWindow: takes a window of batches to one optimizer step, whatever memory does on the way.

    OPEN ──full──▶ REDUCE ──▶ STEP ──▶ DONE ──▶ OPEN (the next window)
      │ ▲             │        │ ▲
      │ └─given up────┘        │ └── memory ran out: the next call resumes here, with the gradients it has
      │                        ▼
      └──flush──────────────▶ ATTEMPT ──▶ REDUCE

**OPEN** takes batches and computes their gradients as they come (`gradient_accumulation.py`). A failed attempt leaves
no trace. **ATTEMPT** computes the gradients of a window that takes no more batches: of one that is flushed, or whose
gradients a failure has changed in part. **REDUCE**: the ranks of a parallel model vote, and add up their gradients
(`rank_sync.py`). **STEP** divides the gradients, clips them and steps the optimizer (`optimizer_stage.py`); a
failure there never shrinks a micro-batch. Where nothing is to be divided or clipped, the optimizer is stepped at
once, and an OptimizerStage does the rest only if that fails. **DONE**: exactly one step has been taken.

What a loss is divided by is the weight of the whole window, over all of its batches and ranks. It is known only when
the window is complete, so gradients are first divided by an estimate (the number of samples) and corrected in STEP.
Where the estimate was right, as for a mean over samples, there is nothing to correct.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import RankError
from penstock.memory.gradient_accumulation import GradientAccumulation
from penstock.memory.optimizer.optimizer_transaction import StepTransaction, StepTransactions
from penstock.memory.optimizer.resume_optimizer import PartialStepError
from penstock.memory.optimizer_stage import OptimizerStage, OptimizerStageError, PartialGradientsError
from penstock.memory.rank_sync import DdpSync, FsdpSync
from penstock.memory.recovery.out_of_memory import FailureLog, OutOfMemoryError, RetryOps, attempt


class WindowState(Enum):
    """What a window needs next."""

    OPEN = auto()
    ATTEMPT = auto()
    REDUCE = auto()
    STEP = auto()
    DONE = auto()


class GradientWindow:
    """The window of one TrainStep.

    Args:
        model: what this rank runs.
        accumulation: the batches and their gradients.
        transaction: steps the optimizer.
        ranks: of a parallel model.
        scaler: what scales the losses, if anything does.
        clip_grad_norm: the largest norm of all gradients together, if this rank is to clip them.
        after_step: called after each optimizer step.
        log: records every failure survived.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulation: GradientAccumulation,
        transaction: StepTransaction | StepTransactions,
        *,
        ranks: DdpSync | FsdpSync | None,
        scaler: torch.amp.GradScaler | None,
        clip_grad_norm: float | None,
        after_step: Sequence[Callable[[], object]],
        log: FailureLog,
    ) -> None:
        self._model = model
        self._accumulation = accumulation
        self._transaction = transaction
        self._ranks = ranks
        self._scaler = scaler
        self._clip_grad_norm = clip_grad_norm
        self._is_plain = scaler is None and clip_grad_norm is None
        """Whether the optimizer's step is all that is left to do with gradients that are right."""
        self._after_step = after_step
        self._log = log
        self._state = WindowState.OPEN
        self._weight: Any = 0.0
        self._factor: float | None = None
        """What to multiply gradients by, where the ranks have agreed on it."""
        self._stage: OptimizerStage | None = None
        self.steps = self.batches = self.skipped = 0

    def add(self, batch: Any) -> Tensor:
        """Add a batch and its gradients; finish the window if it is full. Return the batch's mean loss.

        If this fails before the window is full, the batch has had no effect.
        """
        if self._state is not WindowState.OPEN:
            self.finish()  # the step of an earlier call, which failed after its gradients were complete
        try:
            self._accumulation.add(batch)
            if self._ranks is not None:
                self._share_estimate(self._ranks)
            try:
                loss = self._accumulation.compute()
            except BaseException as failed:
                self._accumulation.remove_last(failed)
                raise
        except Exception as error:
            self._report_failure(error)
            raise
        if self._accumulation.is_full:
            self._state = WindowState.STEP if self._ranks is None else WindowState.REDUCE
            self.finish()
        return loss

    def flush(self) -> None:
        """Finish the window with the batches that it has."""
        if self._state is WindowState.OPEN:
            self._state = WindowState.ATTEMPT
        self.finish()

    def finish(self) -> None:
        """Take the window from its state to DONE, and open the next. After an error, call it again to resume."""
        while self._state is not WindowState.DONE:
            if self._state is WindowState.ATTEMPT:
                self._state = self._attempt()
            elif self._state is WindowState.REDUCE:
                self._state = self._reduce()
            else:
                self._state = self._step()
        self._open_next()

    # ── transitions ─────────────────────────────────────────────────────────────────────────────────────────

    def _attempt(self) -> WindowState:
        if not self._accumulation.is_complete:
            try:
                self._accumulation.compute()
            except Exception as error:
                self._report_failure(error)
                raise
        return WindowState.REDUCE

    def _reduce(self) -> WindowState:
        """Vote with the other ranks, and reduce; no rank gets here without its gradients."""
        accumulation, ranks = self._accumulation, self._ranks
        if ranks is None:
            return WindowState.STEP
        try:
            accumulation.retry(self._sum_weights, "adding up the weights of a batch")
            fitting = accumulation.largest_fitting()
            if isinstance(ranks, FsdpSync):
                accumulation.retry(ranks.compute_norm, "the norm of the gradients")
                totals = ranks.vote_on_totals(self._weight, fitting, accumulation.estimated_weight)
            else:
                totals = ranks.vote_and_reduce(self._weight, fitting)
        except RankError:
            self._give_up()
            raise
        except OutOfMemoryError as error:
            self._report_failure(error)
            raise
        self._weight, self._factor = totals.weight, totals.factor
        accumulation.policy.sizes.limit(totals.micro_batch)
        return WindowState.STEP

    def _step(self) -> WindowState:
        """Divide, unscale, clip and step; ATTEMPT follows where gradients have to be computed again."""
        try:
            if self._stage is None and self._accumulation.is_weight_exact:
                if self._is_plain and self._has_stepped():
                    return WindowState.DONE
                self._stage = self._make_stage(1.0)
            elif self._stage is None:
                self._accumulation.retry(self._correct_and_make_stage, "adding up the weights of a batch")
            assert self._stage is not None
            self._stage.run()
        except PartialGradientsError:
            self._drop_partial_gradients()
            return WindowState.ATTEMPT
        except PartialStepError as error:
            raise OutOfMemoryError(
                f"the optimizer's step failed in its middle ({error}), and its weights and moments are "
                "inconsistent now; go back to a checkpoint, with a new TrainStep"
            ) from error
        except OptimizerStageError as error:
            raise OutOfMemoryError(
                f"{error.action}: {self._accumulation.explain(error.failure)}\n"
                "The gradients are complete; the next call resumes from there."
            ) from None
        return WindowState.DONE

    def _has_stepped(self) -> bool:
        """Step with gradients that are right as they are. Return whether it succeeded; else it can be resumed."""
        failure = attempt(self._transaction.step).failure
        if failure is not None:
            self._log.record(failure)
        return failure is None

    def _open_next(self) -> None:
        """Count the step, call what follows it, and open the next window."""
        stepped = self._stage is None or self._stage.stepped
        self._stage, self._state = None, WindowState.OPEN
        if self._ranks is not None:
            if self._weight:
                self._accumulation.estimated_weight = self._weight
            self._ranks.broadcast_buffers(self._model)
        self.batches += self._accumulation.start_window()
        self.steps += stepped
        self.skipped += not stepped
        if stepped and self._after_step:
            with RetryOps((), self._log):  # a scheduler or a moving average cannot be called a second time
                for call in self._after_step:
                    call()

    # ── failures ────────────────────────────────────────────────────────────────────────────────────────────

    def _report_failure(self, error: Exception) -> None:
        """Let the other ranks know that this one has given up; all of them drop the window."""
        if self._ranks is None:
            return
        if not isinstance(error, RankError):
            self._share_estimate(self._ranks)
            self._ranks.report_failure(error)
        self._give_up()

    def _give_up(self) -> None:
        self._accumulation.drop()
        self._state = WindowState.OPEN

    def _drop_partial_gradients(self) -> None:
        if self._ranks is not None:
            raise OutOfMemoryError(
                "memory ran out while the gradients of all ranks were being divided or clipped, and they cannot be "
                "computed again on this rank alone; go back to a checkpoint"
            )
        self._stage, self._state = None, WindowState.ATTEMPT
        self._accumulation.roll_back()

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────

    def _share_estimate(self, ranks: DdpSync | FsdpSync) -> None:
        """Agree with all ranks on the estimated weight of the first window; later ones take that of the one before."""
        accumulation = self._accumulation
        if not accumulation.is_estimate_shared:
            samples = ranks.sum_over_ranks(accumulation.last_size)
            accumulation.estimated_weight = max(1.0, samples * accumulation.accumulate)
            accumulation.is_estimate_shared = True

    def _sum_weights(self) -> None:
        self._weight = sum(map(float, self._accumulation.weights()), 0.0)

    def _correct_and_make_stage(self) -> None:
        if self._ranks is None:
            self._weight = functools.reduce(operator.add, self._accumulation.weights())
        estimate = self._accumulation.estimated_weight
        self._stage = self._make_stage(_factor(estimate, self._weight) if self._factor is None else self._factor)

    def _make_stage(self, factor: float | Tensor) -> OptimizerStage:
        return OptimizerStage(
            self._transaction,
            factor=factor,
            scaler=self._scaler,
            clip_grad_norm=self._clip_grad_norm,
            log=self._log,
        )


def _factor(estimate: float, weight: Any) -> float | Tensor:
    """Return what turns gradients of sum / estimate into those of sum / weight; without weight there is no gradient."""
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return torch.where(weight == 0, 0.0, estimate / weight)
    weight = float(weight)
    return estimate / weight if weight else 0.0
