"""Hugging Face's Trainer: its `training_step` runs for a batch, or for each part of it, until that fits.

`training_step` is called on the instance, so subclasses that override it or `compute_loss` keep what they do. The loss
of a part is multiplied by its share where `accelerator.backward` gets it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.core.errors import OptionError
from penstock.memory.backward_step import GuardedBackward, Scale, sum_of_losses
from penstock.memory.guarded_optimizer import guard_optimizer
from penstock.memory.recovery.out_of_memory import FailureLog, call_with_retries


def guard_hf_trainer(trainer: Any, options: dict[str, Any]) -> None:
    """Replace what the loop calls on `trainer`: its step, and what makes its optimizer."""
    _reject(trainer)
    training_step, create_optimizer = trainer.training_step, trainer.create_optimizer
    guards: dict[int, tuple[Any, GuardedBackward]] = {}
    log = FailureLog()

    def guarded_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if id(model) not in guards:
            _reject(trainer)
            guards.clear()
            guards[id(model)] = model, GuardedBackward(model, log=log, **options)
            clip = trainer.accelerator.clip_grad_norm_
            trainer.accelerator.clip_grad_norm_ = functools.partial(call_with_retries, clip)

        def run(part: Any, scale: Scale) -> Any:
            with _ScaledBackward(trainer.accelerator, scale):
                return training_step(model, part, num_items_in_batch)

        parts = guards[id(model)][1].run(inputs, run, _restoring(trainer))
        return sum_of_losses([(loss, share) for _, loss, share in parts])

    def create_guarded_optimizer(*args: Any, **kwargs: Any) -> Any:
        created = create_optimizer(*args, **kwargs)
        guard_optimizer(trainer.optimizer, trainer.model, log)
        return created

    trainer.training_step, trainer.create_optimizer = guarded_step, create_guarded_optimizer


def _restoring(trainer: Any) -> Callable[[], None]:
    """Return what puts back the numbers that a step may count in its trainer, and the metrics of TRL's trainers."""
    numbers = {name: value for name, value in vars(trainer).items() if type(value) in (int, float)}
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))

    def restore() -> None:
        vars(trainer).update(numbers)
        if metrics is not None:
            trainer._metrics = copy.deepcopy(metrics)

    return restore


class _ScaledBackward:
    """While it is on, the losses that an Accelerator gets for backward pass through `scale` first."""

    def __init__(self, accelerator: Any, scale: Scale) -> None:
        self._accelerator, self._scale = accelerator, scale
        self._backward = accelerator.backward

    def __enter__(self) -> None:
        self._accelerator.backward = lambda loss, **options: self._backward(self._scale(loss), **options)

    def __exit__(self, *_: object) -> None:
        self._accelerator.backward = self._backward


def _reject(trainer: Any) -> None:
    kind = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
    if kind != "NO":
        raise OptionError(
            f"this Trainer runs with {kind}, whose ranks or engine would be left waiting by one that tries again; "
            "use TrainStep for several ranks, or train in one process"
        )
    if trainer.args.n_gpu > 1:
        raise OptionError(
            "this Trainer runs DataParallel over several GPUs in one process, and what one of them has done when "
            "another runs out of memory is not known; set CUDA_VISIBLE_DEVICES to one, or use TrainStep with torchrun"
        )
    if trainer.accelerator.mixed_precision == "fp8":
        raise OptionError("fp8 keeps maxima of earlier steps where they cannot be put back; use bf16")
    if str(getattr(trainer.args.optim, "value", trainer.args.optim)) in ("lomo", "adalomo"):
        raise OptionError("LOMO steps in backward, which would be done again after a failure; use another optim")
