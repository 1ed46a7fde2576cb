"""MicroBatchRunner: forward and backward of one micro-batch, with the user's loss, autocast and scaler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import OptionError
from penstock.memory.cutting.loss_reduction import reduction_of
from penstock.memory.cutting.micro_batch import Cutting
from penstock.memory.model_tensors import LossFunction, accelerators_of
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.snapshot import SavedBuffers


class MicroBatchRunner:
    """Cuts batches, and runs their parts through a model.

    Args:
        model: what this rank runs.
        loss_fn: `(model, batch) -> (sum of losses, how many they are)`.
        cutting: how batches are cut.
        autocast: what `TrainStep` was given.
        scaler: scales losses before backward, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        cutting: Cutting,
        autocast: torch.dtype | dict[str, Any] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = model
        self.cutting = cutting
        self.devices = accelerators_of(model)
        self._loss_fn = loss_fn
        self._autocast = Autocast(autocast, self.devices)
        self._scaler = scaler
        self._is_reduction_known = False
        self._seed: tuple[tuple[Any, ...], Tensor, int] | None = None
        """The gradient that a backward begins with, with what it depends on, and its version."""

    def cut(self, batch: Any, parts: int) -> Sequence[Any]:
        """Return the micro-batches of `batch`."""
        return self.cutting.cut(batch, parts) if parts > 1 else [batch]

    def add_gradients(self, loss: Tensor, divisor: float) -> None:
        """Do what `(loss / divisor).backward()` does; the gradient that most steps begin with is the same."""
        if self._scaler is not None:
            self._scaler.scale(loss / divisor).backward()
            return
        key = (divisor, loss.shape, loss.dtype, loss.device)
        if self._seed is None or self._seed[0] != key or self._seed[1]._version != self._seed[2]:
            if loss.numel() != 1 or not loss.is_floating_point():
                what = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}"
                raise OptionError(f"loss_fn must return the sum of its losses, which is one number, not {what}")
            gradient = torch.ones_like(loss).div_(divisor)
            self._seed = key, gradient, gradient._version
        loss.backward(self._seed[1])

    def compute_loss(self, part: Any) -> tuple[Tensor, Any]:
        """Return the sum of the losses of `part`, and its weight."""
        found: Any
        if self._autocast.is_off:
            found = self._loss_fn(self.model, part)
        else:
            with self._autocast():
                found = self._loss_fn(self.model, part)
        if isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[0], Tensor):
            loss, weight = found
            if weight is not None:
                return loss, weight
        raise OptionError(
            "loss_fn must return two things, the sum of the losses as a tensor and how many they are (samples or "
            f"tokens), not {found!r}"
        )

    def reject_mean(self, loss: Tensor, weight: Any) -> None:
        """Raise OptionError for the first loss if it is a mean: it would be divided by its count once more."""
        if self._is_reduction_known:
            return
        self._is_reduction_known = True
        found, count = reduction_of(loss), float(weight)
        if found is None or not 1 < count < math.inf:
            return
        is_mean = found.factor <= 1 if found.is_mean else math.isclose(found.factor * count, 1.0, rel_tol=1e-3)
        if is_mean:
            raise OptionError(
                f"loss_fn returns a mean and the count {count:g}. A step divides by the count, so gradients would be "
                f"{count:g} times too small. Return the sum of the losses, as by reduction='sum', or the mean times "
                "what it is a mean of"
            )

    def run_without_effect(self, part: Any) -> None:
        """Run `part` with its losses times zero; buffers and random states are as before."""
        before = RandomState.now(self.devices)
        buffers = SavedBuffers(self.model)
        buffers.save()
        with self._autocast():
            loss, _ = self._loss_fn(self.model, part)
        (loss * 0).backward()
        buffers.restore()
        before.restore()

    def compute_loss_on_cpu(self, model: nn.Module, part: Any) -> tuple[Tensor, Any]:
        """Compute a loss in the precision of the step, for a plan, which is made on the CPU."""
        with self._autocast.on_cpu():
            return self._loss_fn(model, part)

    def reset_half_made_scaler(self) -> None:
        """Let the scaler allocate both of its tensors again: after a failure between them it never makes the second."""
        if self._scaler is not None and self._scaler._growth_tracker is None:
            self._scaler._scale = None


class Autocast:
    """The contexts in which losses are computed.

    Args:
        wanted: a dtype, arguments of `torch.autocast`, or None for full precision.
        devices: the model's accelerators, whose type is the default.
    """

    def __init__(self, wanted: torch.dtype | dict[str, Any] | None, devices: Sequence[torch.device]) -> None:
        self._options: dict[str, Any] | None = None
        if wanted is not None and not isinstance(wanted, (torch.dtype, dict)):
            raise OptionError(
                f"autocast must be a dtype, as in torch.bfloat16, or arguments of torch.autocast, not {wanted!r}"
            )
        if wanted is not None:
            self._options = {"dtype": wanted} if isinstance(wanted, torch.dtype) else dict(wanted)
            self._options.setdefault("device_type", devices[0].type if devices else "cpu")
        self.is_off = self._options is None
        """Whether losses are computed in full precision."""

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the model's own device."""
        return contextlib.nullcontext() if self._options is None else torch.autocast(**self._options)

    def on_cpu(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for the same model on the CPU, where it is planned."""
        if self._options is None:
            return contextlib.nullcontext()
        dtype = self._options.get("dtype") or torch.get_autocast_dtype(self._options["device_type"])
        return torch.autocast(**{**self._options, "device_type": "cpu", "dtype": dtype})
