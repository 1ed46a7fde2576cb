"""CutPolicy: into how many parts the batches of a window are cut, and whether they may be."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import OptionError
from penstock.memory.microbatch.headroom import headroom_of
from penstock.memory.microbatch.size_search import MicroBatchSizes
from penstock.memory.microbatch.split import bucket_of
from penstock.memory.recovery.attempt import attempt
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.step.cut_check import CutCheck, CutChecker
from penstock.memory.step.micro_batch_runner import MicroBatchRunner

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""What torch says where a batch norm is given a single value."""
_NO_VARIANCE = "a batch norm has no variance of a single sample"


@dataclass(eq=False)
class WindowBatch:
    """A batch of a window."""

    batch: Any
    size: int
    before: RandomState
    continues: bool
    """Whether nothing was drawn between the previous batch of the window and this one."""
    after: RandomState | None = None
    loss: Tensor | None = None
    """The sum of its losses, detached."""
    weight: Any = 0
    parts: int = 1
    mean: Tensor | None = None
    """Its mean loss, once it is known."""

    @functools.cached_property
    def bucket(self) -> tuple[Any, ...]:
        """Batches of one bucket need about the same memory per sample."""
        return bucket_of(self.batch)

    @property
    def micro_batch(self) -> int:
        """Samples in its largest part."""
        return -(-self.size // self.parts)

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


class CutPolicy:
    """Decides for one TrainStep.

    Args:
        runner: runs and cuts batches.
        checker: checks, before the first cut, that cutting does not change gradients; None for a sharded model.
        refuses: whether a cut that does is refused; else it is checked, and warned of, when memory was what asked
            for it.
    """

    def __init__(self, runner: MicroBatchRunner, checker: CutChecker | None, *, refuses: bool) -> None:
        self._runner = runner
        self._is_sharded = checker is None
        self._checker = checker
        self._refuses = refuses
        self._least = 1
        """The fewest samples in a part of a batch that is cut."""
        self.sizes = MicroBatchSizes(runner.cutting.micro_batch)
        self.headroom = headroom_of(runner.devices)

    def count_parts(self, one: WindowBatch) -> int:
        """Return into how many parts to cut a batch, by what is known to fit.

        Raises:
            OptionError: it must not be cut.
        """
        if one.batch is None or not (self.sizes.is_limited or self._is_sharded):
            return 1
        parts = self.sizes.count_parts(one.bucket, one.size)
        if self._least > 1 and parts > max(1, one.size // self._least):
            parts = self._without_lone_samples(one)
        if self._is_sharded:  # an out-of-memory on one rank would cost all ranks their attempt
            parts = max(parts, math.ceil(one.size / self.headroom.max_samples(one.bucket)))
        self.check(one, parts)
        return parts

    def check(self, one: WindowBatch, parts: int) -> None:
        """Raise OptionError where a batch must not be cut into `parts`."""
        if parts == 1:
            return
        if why := self._runner.why_not_cut(one.batch):
            raise OptionError(f"this batch would be cut into micro-batches, and {why}")
        is_for_memory = not math.isinf(self.sizes.largest_fitting(one.bucket))
        if self._checker is None or one.batch is None or not (self._refuses or is_for_memory):
            return
        found = self._find_difference(self._checker, one.batch, max(1, min(parts, one.size // 2)))
        if found is not None and self._refuses:
            raise OptionError(f"this batch would be cut into micro-batches, and {found}")
        self._checker = None
        if found is not None:
            warnings.warn(f"memory ran out, so batches are cut from now on, and {found}", stacklevel=2)

    def why_not_smaller(self, failed: WindowBatch, retried: set[int]) -> str:
        """Return why a batch that has failed must not be cut into smaller parts; empty where it may be."""
        if failed.micro_batch not in retried:
            return ""
        if failed.parts == 1 and (why := self._runner.why_not_cut(failed.batch)):
            return f"The batch was not cut: {why}."
        if failed.parts > 1 and failed.parts == failed.size // self._least:
            return f"It was not cut further: {_NO_VARIANCE}."
        return ""

    def avoids_lone_samples(self, error: ValueError, run: list[WindowBatch]) -> bool:
        """Cut into parts of two samples at least, if an error says that a batch norm was given a single value.

        Return whether that changes how the batches that were run are cut.
        """
        if self._is_sharded or self._least > 1 or _ONE_VALUE not in str(error):
            return False
        if not any(one.parts > max(1, one.size // 2) for one in run):
            return False
        self._least = 2
        return True

    def _without_lone_samples(self, one: WindowBatch) -> int:
        parts = max(1, one.size // self._least)
        limit = self._runner.cutting.micro_batch
        if limit is not None and -(-one.size // parts) > limit:
            raise OptionError(
                f"a batch of {one.size} samples in micro-batches of {limit} has one with a single sample, and "
                f"{_NO_VARIANCE}; choose a larger micro_batch="
            )
        return parts

    def _find_difference(self, checker: CutChecker, batch: Any, parts: int) -> CutCheck | None:
        """Return what is certainly wrong with cutting a part of `batch` that fits; None where nothing is."""
        if self._runner.is_batch_dependent():
            return None  # which the user has allowed
        try:
            found = attempt(lambda: checker.check_if_affordable(self._runner.cut(batch, parts)[0])).value
        except Exception:
            if self._refuses:
                raise
            return None  # a batch is trained on in any case
        return found if found is not None and found.is_certain and not found.is_same else None
