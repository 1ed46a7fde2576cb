"""Lightning's automatic optimization: the closure of a batch runs `training_step` and backward until they fit.

The closure is what the loop makes for each batch, and what precision plugins, clipping and the optimizer's step call.
Its inner part is replaced; gradients are zeroed first, so that those of the step before need no copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from penstock.core.errors import OptionError
from penstock.memory.backward_step import GuardedBackward, Scale, sum_of_losses
from penstock.memory.cutting.join import join_outputs
from penstock.memory.guarded_optimizer import guard_optimizer
from penstock.memory.recovery.out_of_memory import FailureLog, OutOfMemoryError, call_with_retries


def guard_lightning_trainer(trainer: Any, options: dict[str, Any]) -> None:
    """Replace the closures that `trainer` makes."""
    if type(trainer.strategy).__name__ != "SingleDeviceStrategy":
        raise OptionError(
            f"this Trainer runs with {type(trainer.strategy).__name__}, whose ranks communicate in backward, and would "
            "be left waiting by one that tries again; use devices=1, or TrainStep in manual optimization"
        )
    precision = trainer.precision_plugin
    precision.clip_gradients = functools.partial(call_with_retries, precision.clip_gradients)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make_closure = loop._make_closure
    guards: dict[int, tuple[Any, GuardedBackward]] = {}
    log = FailureLog()

    def make_guarded_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        if "batch" not in kwargs:
            raise OptionError("a training_step that takes dataloader_iter cannot be given its batch a second time")
        module = trainer.lightning_module
        if id(module) not in guards:
            guards.clear()
            guards[id(module)] = module, GuardedBackward(module, log=log, **options)
        guard_optimizer(optimizer, module, log)
        closure = make_closure(kwargs, optimizer, batch_idx)
        if closure._backward_fn is not None:
            step = _LightningStep(trainer, guards[id(module)][1], closure, lambda own: make_closure(own, optimizer, 0))
            closure.closure = lambda *_args, **_kwargs: step.run(kwargs)
        return closure

    loop._make_closure = make_guarded_closure


class _LightningStep:
    """What one closure does: zero the gradients, then forward and backward of the batch or of its parts."""

    def __init__(self, trainer: Any, guard: GuardedBackward, closure: Any, make_closure: Callable[[Any], Any]) -> None:
        self._guard, self._closure, self._make_closure = guard, closure, make_closure
        self._results = trainer._results
        self._logged: dict[str, Any] = {}

    @torch.enable_grad()
    def run(self, kwargs: Any) -> Any:
        batch = kwargs["batch"]
        if self._closure._zero_grad_fn is not None:
            self._closure._zero_grad_fn()
        self._logged = {key: dict(metric.__dict__) for key, metric in self._results.items()}

        def run_part(part: Any, scale: Scale) -> Any:
            self._log_for(part)
            closure = self._closure if part is batch else self._make_closure({**kwargs, "batch": part})
            output = closure._step_fn()
            if output.closure_loss is not None:
                closure._backward_fn(scale(output.closure_loss))
            return output

        try:
            found = self._guard.run(batch, run_part, self._restore_logged)
        finally:
            self._log_for(batch)
        return found[0][1] if len(found) == 1 else self._join(found)

    def _join(self, found: list[tuple[Any, Any, float]]) -> Any:
        """Return one result for those of the parts."""
        outputs = [output for _, output, _ in found]
        try:
            extra = join_outputs(
                [one.extra for one in outputs], [self._guard.count_samples(part) for part, _, _ in found]
            )
        except OptionError as error:
            raise OutOfMemoryError(
                f"memory ran out, and what training_step returns beside the loss cannot be joined: {error}"
            ) from None
        joined = dataclasses.replace(outputs[0], closure_loss=None, extra=extra)
        joined.loss = sum_of_losses(
            [(output.loss, share) for output, (_, _, share) in zip(outputs, found, strict=True)]
        )
        return joined

    def _log_for(self, batch: Any) -> None:
        """Let what is logged be weighted by the samples of a part."""
        self._results.batch, self._results.batch_size = batch, None

    def _restore_logged(self) -> None:
        """Forget what a failed attempt has logged."""
        for key in [*self._results]:
            if key in self._logged:
                self._results[key].__dict__.update(self._logged[key])
            else:
                del self._results[key]
