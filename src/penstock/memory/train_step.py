"""TrainStep: one optimizer step per window of batches, with the same gradients however often memory runs out.

step(batch) ─▶ GradientWindow: attempt ─▶ vote ─▶ reduce ─▶ step
└ GradientAccumulation: a failed attempt is undone and retried, in smaller micro-batches
└ MicroBatchRunner: forward and backward of one micro-batch
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.distributed.rank_group import RankGroup, is_sharded, rank_group_of
from penstock.memory.cutting.cut_check import CutCheck, gradient_comparison
from penstock.memory.cutting.cut_policy import CutPolicy
from penstock.memory.cutting.micro_batch import Cutting, MicroBatchSizes
from penstock.memory.cutting.split import Dims, LayerNames, Split
from penstock.memory.gradient_accumulation import GradientAccumulation
from penstock.memory.gradient_window import GradientWindow
from penstock.memory.live_steps import live_steps
from penstock.memory.micro_batch_runner import MicroBatchRunner
from penstock.memory.model_tensors import LossFunction, accelerators_of
from penstock.memory.optimizer.joined_optimizers import as_one_optimizer, reject_gradient_hooks
from penstock.memory.optimizer.optimizer_transaction import transaction_of
from penstock.memory.planning.planner import plan
from penstock.memory.rank_sync import DdpSync, FsdpSync
from penstock.memory.recovery.out_of_memory import Failure, FailureLog, OutOfMemoryError, attempt
from penstock.memory.recovery.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """A snapshot of what a TrainStep has done so far."""

    steps: int
    """Optimizer steps taken."""

    batches: int
    """Batches that took part in them."""

    out_of_memory: int
    """Failures survived."""

    skipped: int
    """Steps that the GradScaler skipped because of infinite gradients."""

    micro_batch: int | None
    """Samples in the largest part of the last batch; None before the first one."""

    last_failure: Failure | None
    """The latest failure survived."""


class TrainStep:
    """A training step that survives out-of-memory with the same gradients.

    Args:
        model: on its device. One that is DistributedDataParallel, or sharded (FSDP2), is stepped on all ranks together.
        optimizer: any that needs no closure, of torch's or not; or several of them as a list, which are stepped one
            after the other (with a scaler: all of them, or none). What an optimizer keeps is put back after a failure
            in its step, wherever it keeps it. For an optimizer that is not torch's that takes a copy of parameters,
            gradients and moments: in its first steps, and, if they cannot be proven to be resumable, in all after the
            first out-of-memory (which is refused, where it comes in the middle of such a step and cannot be resumed).
        loss_fn: `(model, batch) -> (loss_sum, weight)`: a sum over samples or tokens, and their count. The gradient
            is that of the sum of all sums divided by the sum of all counts, however a batch is cut.
        micro_batch: the most samples that go through the model at once: a number, None for the whole batch, or "auto"
            for as many as `plan` predicts to fit `budget`, planned with the first batch. In any case an out-of-memory
            makes the parts smaller, for batches of that shape. Before the first cut a part that fits is compared, as by
            `check`: a cut that changes gradients is refused, and one that cannot be compared is warned of.
        budget: for "auto": as in "70GiB", or bytes; by default the accelerator's free memory, and no limit without one.
        accumulate: batches per optimizer step.
        scaler: a `torch.amp.GradScaler`.
        autocast: a dtype, or arguments of `torch.autocast`, under which `loss_fn` runs.
        clip_grad_norm: the largest norm of all gradients together.
        scheduler: stepped after each optimizer step (not after one that the scaler skipped).
        after_step: called after each optimizer step, for example to update a moving average of the weights.
        split: `(batch, parts) -> batches`, for batches that penstock cannot cut.
        batch_size: `batch -> samples`, for batches whose samples are not the first dimension of their first tensor.
        batch_dims: which dimension of a batch's tensors has the samples, where it is not the first one of all: a
            number, or a dict as in `{"frames": 1, "table": None}`, with None for what goes to every part as it is.
        also: what else to put back after a failed attempt: modules (a discriminator, a key encoder) with parameters,
            buffers and gradients, generators of random numbers, and objects with `state_dict` and `load_state_dict`
            (metrics). They are copied before each window. Attributes of the model (counters, hidden states, queues)
            are found without being said. What else `loss_fn` changes stays changed, and a warning names it.
        allow_batch_dependent: classes or qualified names of layers that may see smaller micro-batches, although their
            result for a sample depends on the other samples (BatchNorm in training); True for all that couples
            samples, as negatives in the batch do. Cuts are not compared then.

    Raises:
        OptionError: an argument is out of range, two arguments exclude each other, or something is stepped in
            backward.

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
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFunction,
        *,
        micro_batch: int | Literal["auto"] | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | dict[str, Any] | None = None,
        clip_grad_norm: float | None = None,
        scheduler: Any = None,
        after_step: Callable[[], object] | Sequence[Callable[[], object]] = (),
        split: Split | None = None,
        batch_size: Callable[[Any], int] | None = None,
        batch_dims: Dims | None = None,
        also: Sequence[Any] = (),
        allow_batch_dependent: LayerNames | bool = (),
        budget: str | float | None = None,
    ) -> None:
        _check(micro_batch, accumulate, scheduler)
        self.model = model
        self.optimizer = optimizer = as_one_optimizer(optimizer, model.parameters())
        reject_gradient_hooks([*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])])
        self._inner, ranks = rank_group_of(model)
        devices = accelerators_of(model)
        self._is_to_plan = micro_batch == "auto" and (budget is not None or bool(devices))
        self._budget = budget
        self._cutting = cutting = Cutting(
            micro_batch=None if micro_batch is None or isinstance(micro_batch, str) else int(micro_batch),
            split=split,
            batch_size=batch_size,
            batch_dims=batch_dims,
            also=also,
            allow_batch_dependent=allow_batch_dependent,
        )
        self._log = FailureLog()
        self._turn = [True]
        """Taken by a call, as a lock that can be copied."""
        self._transaction = transaction_of(optimizer, log=self._log)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._sync = sync = None if ranks is None else _make_sync(model, ranks, optimizer, scaler, clip_grad_norm)
        fsdp = sync if isinstance(sync, FsdpSync) else None
        self._runner = MicroBatchRunner(self._inner, loss_fn, cutting, autocast, scaler)
        warned: set[str] = set()
        snapshot = Snapshot(self._inner, optimizer, also, loss_fn, copies_all=True, warned=warned)
        self._comparison = gradient_comparison(cutting, snapshot, self._runner.compute_loss)
        self._accumulation = GradientAccumulation(
            self._runner,
            optimizer,
            accumulate=accumulate,
            log=self._log,
            fsdp=fsdp,
            policy=CutPolicy(
                self._inner,
                cutting,
                self._comparison if fsdp is None else None,
                self._explain,
            ),
            snapshot=Snapshot(
                self._inner, optimizer, also, loss_fn, with_stepped=False, is_watching=fsdp is None, warned=warned
            ),
        )
        hooks = (after_step,) if callable(after_step) else tuple(after_step)
        hooks = hooks if scheduler is None else (scheduler.step, *hooks)
        self._window = self._make_window(scaler, None if fsdp is not None else clip_grad_norm, hooks)
        live_steps.add(self)

    def __call__(self, batch: Any) -> Tensor:
        """Train on `batch`; every `accumulate` batches, step the optimizer.

        All ranks of a parallel model call this together; those that have no batch left pass None.

        Returns:
            The weighted mean of the batch's losses: detached, without dimensions, on the model's device.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the optimizer's step does not. The batch has had no
                effect then.
            RankError: another rank has given up.
            OptionError: it is being called already.
        """
        try:
            self._turn.pop()
        except IndexError:
            raise OptionError(
                "this TrainStep is being called already, by another thread or by what it calls; let them take turns"
            ) from None
        try:
            if self._is_to_plan and batch is not None and self._cutting.count(batch):
                self._plan_micro_batch(batch)
            return self._window.add(batch)
        finally:
            self._turn.append(True)

    def flush(self) -> bool:
        """Step with the batches accumulated so far, if there are any (at the end of an epoch). Return whether it did.

        All ranks of a parallel model call this together.
        """
        if not len(self._accumulation):
            return False
        self._window.flush()
        return True

    def check(self, batch: Any, parts: int | None = None) -> CutCheck:
        """Compare the gradients of a batch that is run whole with those of the same batch, cut.

        Nothing changes: weights, gradients, buffers and random states are as before. On top of what the whole batch
        takes there is a copy of the weights, and two of the gradients on the host.

        Args:
            batch: of at least two samples, as they are trained on.
            parts: how many to cut it into; by default a small number that makes their sizes differ.

        Raises:
            OptionError: the batch cannot be cut, or the model is sharded.
            OutOfMemoryError: the whole batch does not fit.

        Example:
            >>> model = nn.Linear(3, 2)
            >>> def loss_fn(model, x):  # a mean where a sum is asked for
            ...     return model(x).square().mean(), len(x)
            >>> step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn)
            >>> step.check(torch.ones(4, 3)).is_same
            False
        """
        if isinstance(self._sync, FsdpSync):
            raise OptionError("ranks of a sharded model cannot be checked; check the same model before fully_shard")
        result = attempt(functools.partial(self._comparison.check, batch, parts))
        if result.failure is not None:
            raise OutOfMemoryError(self._explain(result.failure))
        assert result.value is not None
        return result.value

    def statistics(self) -> StepStatistics:
        """Return what has been counted so far."""
        return StepStatistics(
            steps=self._window.steps,
            batches=self._window.batches,
            out_of_memory=self._log.count,
            skipped=self._window.skipped,
            micro_batch=self._accumulation.micro_batch,
            last_failure=self._log.last,
        )

    def _explain(self, failure: Failure) -> str:
        return self._accumulation.explain(failure)

    def _make_window(
        self,
        scaler: torch.amp.GradScaler | None,
        clip_grad_norm: float | None,
        after_step: Sequence[Callable[[], object]],
    ) -> GradientWindow:
        return GradientWindow(
            self._inner,
            self._accumulation,
            self._transaction,
            ranks=self._sync,
            scaler=scaler,
            clip_grad_norm=clip_grad_norm,
            after_step=after_step,
            log=self._log,
        )

    def _plan_micro_batch(self, batch: Any) -> None:
        """Begin with as many samples at once as the plan predicts to fit the budget."""
        self._is_to_plan = False
        try:
            found = plan(
                self._inner,
                self._runner.compute_loss_on_cpu,
                batch,
                self.optimizer,
                budget=self._budget,
                split=self._cutting.cut,
                batch_size=self._cutting.count,
                modes=("plain",),
                allow_batch_dependent=self._cutting.allow_batch_dependent,
                verify=False,
            )
        except OptionError:
            raise
        except Exception as error:  # noqa: BLE001  the user's code on fake tensors
            warnings.warn(
                f'micro_batch="auto" begins with whole batches: this step cannot be planned ({error})', stacklevel=3
            )
            return
        smallest = min(found.variants, key=lambda variant: variant.peak_nbytes)
        self._accumulation.policy.sizes = MicroBatchSizes((found.choice or smallest).micro_batch)


def _check(micro_batch: int | Literal["auto"] | None, accumulate: int, scheduler: object) -> None:
    if micro_batch is not None and micro_batch != "auto" and not _is_count(micro_batch):
        raise OptionError(
            f"micro_batch must be a number of samples, at least 1, or 'auto' or None, not {micro_batch!r}"
        )
    if not _is_count(accumulate):
        raise OptionError(f"accumulate must be a number of batches, at least 1, not {accumulate!r}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise OptionError(
            "ReduceLROnPlateau is stepped with a metric, which a training step does not have; step it yourself"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


def _make_sync(
    model: nn.Module,
    ranks: RankGroup,
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler | None,
    clip_grad_norm: float | None,
) -> DdpSync | FsdpSync:
    if not is_sharded(model):
        return DdpSync(ranks, optimizer)
    if scaler is not None:
        raise OptionError(
            "a GradScaler decides on this rank's gradients alone, and those of a sharded model are spread over all; "
            "use bfloat16, which needs no scaler"
        )
    return FsdpSync(model, ranks, optimizer, clip_grad_norm)
