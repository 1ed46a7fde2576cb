"""plan: the peak memory of a training step, by role, predicted for every way to run it.

The step runs on fake tensors, which have sizes and hold no bytes, on the fake CPU: it needs no GPU and no memory. Each
variant is a micro-batch size, with or without checkpointed blocks, with or without their inputs offloaded. For many
ranks, the step is that of one of them, whose collectives do nothing. A first, small step allocates the optimizer's
state. Models that decide by the values of tensors cannot run that way, nor can operators without support for fake
tensors. Such steps are measured on real tensors, and the operator is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.core.units import to_nbytes
from penstock.device.accelerator import free_and_total_nbytes
from penstock.device.cuda import blas_workspace_nbytes, sum_buffer_nbytes, take_blas_workspaces
from penstock.memory.accounting.byte_counter import ALLOCATOR_GRAIN_NBYTES, SumBuffer
from penstock.memory.cutting.split import (
    LayerNames,
    Split,
    batch_dependent_layers,
    count_samples,
    explain_batch_dependence,
    split_batch,
)
from penstock.memory.model_tensors import LossFunction, accelerators_of
from penstock.memory.optimizer.optimizer_state import reject_closure_optimizer
from penstock.memory.planning.fake_run import MODES, FakeRun, Mode, Progress, error_text
from penstock.memory.planning.parallel_layout import ParallelLayout, Shard
from penstock.memory.planning.step_variants import Plan, StepVariant
from penstock.memory.planning.verify_plan import verify_plan

RELATIVE_ERROR = 0.03
"""How far a prediction may be off."""

FRAGMENTATION = 0.05
"""What torch's allocator needs beside what is allocated, where it cuts segments. Without it the GPT of 2.7 billion
parameters in bfloat16 of `benchmarks.plans` does not run in its budget; with it the nine models that were run do. Those
of some 100 MiB need more, as segments have 20 MiB, and have it by the allowance for the workspaces of convolutions."""


def plan(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    budget: str | float | None = None,
    split: Split = split_batch,
    batch_size: Callable[[Any], int] = count_samples,
    modes: Sequence[Mode] = MODES,
    allow_batch_dependent: LayerNames | bool = (),
    ranks: int = 1,
    shard: Shard = "fsdp2",
    forward_only: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Plan:
    """Predict the peak memory of a training step for each way to run it, and choose one.

    `model` and `optimizer` are not changed, and no memory of the device is used, with one exception: where the model
    lies on an accelerator, forward and backward of the choice run there once, measured and undone, and the plan is
    corrected by that. Slowdowns are estimated: operations computed again count as such, bytes moved to the host at
    25 GB/s against 100 TFLOP/s of computing, and each further micro-batch as 1 % of the step.

    Args:
        model: on whatever device.
        loss_fn: `(model, batch) -> (loss_sum, weight)`, as for `TrainStep`.
        batch: a whole one, of real tensors; only their shapes matter.
        optimizer: the model's; None without one.
        budget: as in "70GiB", or bytes; by default what the accelerator has free.
        split: `(batch, parts) -> batches`, for batches that penstock cannot cut.
        batch_size: `batch -> samples`, for batches whose samples are not the first dimension of their first tensor.
        modes: which of "plain", "selective" (checkpointed blocks keep the results of products, convolutions and
            attention), "checkpointed" and "offloaded" to predict. Where the model does not run with
            checkpointed blocks, the plan has a warning.
        allow_batch_dependent: as for `TrainStep`: a model with layers whose result depends on the other samples of a
            micro-batch (BatchNorm in training) is planned for whole batches only, unless they are allowed.
        ranks: the peak is that of one of so many ranks, with gathered layers and buffers of communication. `model` and
            `optimizer` are those of one process, not sharded; `batch` is what one rank gets.
        shard: "fsdp2" calls `fully_shard` for each block of the model (modules with children, in a ModuleList or
            Sequential) and for the model; "ddp" has the whole model and buckets for all gradients on each rank; a
            function of (model, mesh) calls `fully_shard` with options of its own.
        forward_only: whether to plan evaluation or inference: `loss_fn` returns any output, which is held (with its
            caches of keys and values), and there is neither backward nor an optimizer. The outputs of micro-batches
            are joined, as `EvalStep` does.
        verify: whether to run the choice, where the model lies on an accelerator.
        progress: called with how many steps were run, and how many there are.

    Raises:
        OptionError: the budget is not a size, or is missing where there is no accelerator; the optimizer needs a
            closure; the ranks cannot be arranged like that; or a step on many ranks does not run without values.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> def loss_fn(model, x):
        ...     return model(x).square().sum(), len(x)
        >>> found = plan(model, loss_fn, torch.zeros(1024, 64), budget="560KiB")
        >>> found.choice.micro_batch
        256
    """
    reject_closure_optimizer(optimizer)
    limit_nbytes = to_budget(budget)
    on_device = any(p.device.type not in ("cpu", "meta") for p in model.parameters())
    layout = ParallelLayout(ranks=ranks, shard=shard)
    dependent = [] if forward_only else batch_dependent_layers(model, allow_batch_dependent)
    run = FakeRun(
        model,
        loss_fn,
        batch,
        None if forward_only else optimizer,
        split=split,
        count_samples=batch_size,
        modes=modes,
        cuts=not dependent,
        layout=layout if ranks > 1 else None,
        forward_only=forward_only,
        grain_nbytes=ALLOCATOR_GRAIN_NBYTES if on_device else 1,
        products_nbytes=(1 if forward_only else 2)
        * max((blas_workspace_nbytes(p.device) for p in model.parameters()), default=0),
        sum_buffer=_sum_buffer(model),
        progress=progress,
    )
    variants, measured = _run(run, on_many_ranks=ranks > 1)
    notes = [f"smaller micro-batches are left out: {explain_batch_dependence(dependent)}"] if dependent else []
    empty = Plan(
        budget_nbytes=limit_nbytes,
        variants=(),
        choice=None,
        relative_error=RELATIVE_ERROR,
        fragmentation=FRAGMENTATION if cuts_segments() else 0.0,
        measured=measured,
        warnings=(*notes, *run.warnings()),
    )
    found = empty.choose(tuple(variants))
    if not (on_device and verify and ranks == 1 and not forward_only):
        return found
    if run.multiplies:
        take_blas_workspaces(accelerators_of(model)[0])  # else they would be counted as what the samples take
    return verify_plan(found, model, loss_fn, batch, split)


def cuts_segments() -> bool:
    """Return whether torch's allocator gives out pieces of segments, between which nothing may fit.

    Source: torch's notes "CUDA semantics", on optimizing memory usage.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return not {"expandable_segments:True", "backend:cudaMallocAsync"} & {one.strip() for one in text.split(",")}


def _run(run: FakeRun, *, on_many_ranks: bool) -> tuple[list[StepVariant], str]:
    """Return the variants, and why they were measured."""
    try:
        return run.run(fake=True), ""
    except OptionError:
        raise
    except Exception as error:
        # The user's code on fake tensors; on real ones its own errors are raised.
        if on_many_ranks:
            text = f"the step of a rank does not run on tensors without values: {error_text(error)}"
            raise OptionError(f"{text}; plan it for one rank, where it can be measured") from error
        return run.run(fake=False), _why_measured(error)


def _why_measured(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} depends on the values of tensors, so the step was measured instead"
    return f"the step does not run without values ({error_text(error)}), so it was measured instead"


def _sum_buffer(model: nn.Module) -> SumBuffer | None:
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    return None if device is None else partial(sum_buffer_nbytes, device)


def to_budget(wanted: str | float | None) -> int:
    """Return a budget in bytes: as in "70GiB", or by default what the accelerator has free.

    Raises:
        OptionError: it is not a size, or is missing where there is no accelerator.
    """
    if wanted is None:
        if not torch.accelerator.is_available():
            raise OptionError("a budget is needed where there is no accelerator; pass one, as in budget='24GiB'")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return free_and_total_nbytes(torch.device(accelerator.type, torch.accelerator.current_device_index()))[0]
    return to_nbytes("budget", wanted, least=1)
