"""CutPolicy: whether and how a batch is cut, the same for every step.

A cut that changes the result, as far as that is known, is refused with what to change. One that was compared and agrees
is made. One that could not be compared is made with a warning, once. What was learned about sizes is forgotten when a
cut is refused or fails in another way, so that a batch that fits later is run whole again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.core.errors import OptionError, PenstockError
from penstock.device.oom import is_out_of_memory
from penstock.memory.cutting.cut_check import Comparison, CutCheck
from penstock.memory.cutting.micro_batch import Cutting, MicroBatchSizes
from penstock.memory.cutting.split import (
    arrays_of,
    batch_dependent_layers,
    explain_batch_dependence,
    explain_single_row,
    mixes_single_rows,
)
from penstock.memory.recovery.out_of_memory import Failure, OutOfMemoryError, attempt, clear_frames, free_memory
from penstock.memory.recovery.random_state import RandomState

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""What torch says where a batch norm is given a single value."""
_REMEDY = (
    "Samples that meet one another (negatives in the batch, statistics of it), a mean where loss_fn should return a "
    "sum, a penalty that each part adds, and a dimension that is not that of the samples (see batch_dims=) do that. "
    "Make batches that fit, or allow it with allow_batch_dependent=True"
)

Explain = Callable[[Failure], str]
Bucket = tuple[Any, ...]


class CutRefusedError(Exception):
    """A batch must not be cut; why. The cause is the error of a part, if one has failed."""


class CutPolicy:
    """Decides for one step.

    Args:
        model: what the step runs.
        cutting: how batches are cut.
        comparison: compares a whole batch with its parts; None where ranks would have to meet for that.
        explain: describes a failure.
        run: runs the model for a batch, to see what it takes; None where that is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        cutting: Cutting,
        comparison: Comparison | None,
        explain: Explain,
        run: Callable[[Any], object] | None = None,
    ) -> None:
        self._model, self._cutting, self._comparison, self._run = model, cutting, comparison, run
        self._explain = explain
        self.sizes = MicroBatchSizes(cutting.micro_batch)
        self._failures: dict[Bucket, Failure] = {}
        """What made batches be cut."""
        self._least = 1
        """The fewest samples in a part of a batch that is cut."""
        self._tries = 0
        """How often a comparison was tried and not possible."""
        self._has_warned = False
        self._refused: dict[Bucket, str] = {}
        self._takes_samples: dict[Bucket, bool | None] = {}
        """By bucket of batches with tensors of one row: whether the model's input has a row for each sample."""

    # ── before an attempt ───────────────────────────────────────────────────────────────────────────────────

    def count_parts(self, batch: Any, bucket: Bucket, size: int) -> int:
        """Return into how many parts to cut a batch, by what is known to fit.

        Raises:
            CutRefusedError: it must not be cut.
        """
        if not self.sizes.is_limited:
            return 1
        parts = self.sizes.count_parts(bucket, size)
        if self._least > 1 and parts > max(1, size // self._least):
            parts = max(1, size // self._least)
            limit = self._cutting.micro_batch
            if limit is not None and -(-size // parts) > limit:
                raise CutRefusedError(
                    f"in parts of {limit} samples, one of its {size} would be alone, and a batch norm has no variance "
                    "of a single sample; choose a larger micro_batch="
                )
        self.check(batch, bucket, size, parts)
        return parts

    def check(self, batch: Any, bucket: Bucket, size: int, parts: int) -> None:
        """Raise CutRefusedError where a batch must not be cut into so many parts."""
        if parts == 1:
            return
        if why := self._refused.get(bucket) or self._why_never(batch, bucket, size):
            raise CutRefusedError(why)
        if self._cutting.is_allowed or batch_dependent_layers(self._model):
            return
        if self._comparison is None:
            self._warn("the ranks of a sharded model would have to meet to compare the gradients; see check()")
            return
        try:
            found = self._compare(self._comparison, batch, self._cutting.cut(batch, parts), size)
        except Exception as error:
            if is_out_of_memory(error) or not self._has_failed(bucket):
                error.add_note(f"this batch of {size} samples was cut into {parts} parts; see batch_dims= and split=")
                raise
            raise CutRefusedError(_of_a_part(error)) from error
        self._judge(found, bucket)

    def _judge(self, found: CutCheck | str | None, bucket: Bucket) -> None:
        """Refuse a cut, or warn of it, by what a comparison has found."""
        if isinstance(found, str):
            self._warn(f"whether that changes the result could not be compared: {found}")
        elif found is None or found.is_same:
            return
        elif not found.is_certain:
            chance = "random numbers are drawn that are others for each part"
            self._warn(f"whether that changes the result could not be compared: {chance}; {found}")
        elif found.largest > found.tolerance:
            self._refused[bucket] = f"{found}. {_REMEDY}"
            raise CutRefusedError(self._refused[bucket])
        else:
            self._warn(str(found))

    def _why_never(self, batch: Any, bucket: Bucket, size: int) -> str:
        """Return why a batch must not be cut, whatever a comparison would say; empty where it may be."""
        if why := self._cutting.why_uncountable(batch):
            return why
        if self._cutting.is_allowed:
            return ""
        if dependent := batch_dependent_layers(self._model, self._cutting.allow_batch_dependent):
            return explain_batch_dependence(dependent)
        if not self._cutting.is_guessed or not mixes_single_rows(batch, size):
            return ""
        if bucket not in self._takes_samples:
            self._takes_samples[bucket] = None if self._run is None else self._model_takes_rows(batch, size, self._run)
        takes = self._takes_samples[bucket]
        return "" if takes else explain_single_row(size, is_known=takes is not None)

    def _model_takes_rows(self, batch: Any, size: int, run: Callable[[Any], object]) -> bool | None:
        """Return whether the model's input has a row for each sample; None if it is not called."""
        rows: set[int] = set()

        def look(model: nn.Module, args: Any, kwargs: Any) -> None:
            rows.update(one.shape[0] for one in arrays_of((args, kwargs)) if one.ndim)
            raise _InputSeenError

        before = RandomState.now({p.device for p in self._model.parameters() if p.device.type not in ("cpu", "meta")})
        hook = self._model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
        try:
            with torch.no_grad():
                attempt(functools.partial(run, batch))
        except _InputSeenError:
            return size in rows
        finally:
            hook.remove()
            before.restore()
        return None

    def _compare(self, comparison: Comparison, batch: Any, cut: Any, size: int) -> CutCheck | str | None:
        """Compare a part that fits; the smaller the less memory there is. None where nothing is left to compare."""
        if not comparison.is_due(batch, cut):
            return None
        self._tries += 1
        if self._tries & (self._tries - 1):
            return None  # it was tried in vain; it is tried again, ever more rarely
        samples = max(2, -(-size // len(cut)))
        while True:
            pieces = self._cutting.cut(batch, -(-size // samples)) if samples < size else [batch]
            result = attempt(functools.partial(comparison.compare, pieces[0]))
            if result.failure is None:
                return result.value
            if samples == 2:
                return "not even two samples fit at once"
            samples = max(2, samples // 2)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"batches are cut from now on, and {why}", stacklevel=2)

    # ── after an attempt ────────────────────────────────────────────────────────────────────────────────────

    def record_success(self, bucket: Bucket, micro_batch: int) -> None:
        """Record that parts of so many samples fitted."""
        if self.sizes.is_limited:
            self.sizes.record_success(bucket, micro_batch)

    def record_failure(self, bucket: Bucket, size: int, parts: int, failure: Failure, retried: set[int]) -> None:
        """Record that memory ran out; the next attempt follows.

        Raises:
            OutOfMemoryError: nothing is left to try.
        """
        self._failures[bucket] = failure
        micro_batch = -(-size // parts)
        why = ""
        if micro_batch in retried and parts > 1 and self._least > 1 and parts == size // self._least:
            why = "\nIt was not cut further: a batch norm has no variance of a single sample."
        if why or not self.sizes.retry_or_shrink(bucket, micro_batch, retried):
            self.sizes.forget(bucket)
            raise OutOfMemoryError(f"{self._explain(failure)}{why}")

    def refused(self, error: CutRefusedError, bucket: Bucket) -> PenstockError:
        """Return the error to raise for a cut that is refused, and forget what made it necessary."""
        if not self._has_failed(bucket):
            return OptionError(f"this batch would be cut into micro-batches, and {error}")
        self.sizes.forget(bucket)
        return OutOfMemoryError(f"{self._explain(self._failures[bucket])}\nThe batch was not cut: {error}.")

    def of_a_cut(self, error: Exception, bucket: Bucket, size: int, parts: int) -> OutOfMemoryError | None:
        """Return what to raise for a batch that was cut for memory and fails in another way; None if cuts went well."""
        if parts == 1 or isinstance(error, PenstockError | CutRefusedError) or not self.sizes.is_untried(bucket):
            return None
        self.sizes.forget(bucket)
        why = f"{size} samples were cut into {parts} parts for that, and {_of_a_part(error)}"
        return OutOfMemoryError(f"{self._explain(self._failures[bucket])}\n{why}.")

    def avoids_lone_samples(self, error: Exception, size: int, parts: int) -> bool:
        """Cut into parts of two samples at least, if an error says that a batch norm was given a single value.

        Return whether that changes how the batch is cut.
        """
        if self._least > 1 or _ONE_VALUE not in str(error) or parts <= max(1, size // 2):
            return False
        clear_frames(error)
        free_memory()
        self._least = 2
        return True

    def _has_failed(self, bucket: Bucket) -> bool:
        """Return whether batches of a bucket are cut because memory ran out."""
        return bucket in self._failures and self.sizes.has_failed(bucket)


class _InputSeenError(Exception):
    """Ends a forward whose input has been seen."""


def _of_a_part(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"a part fails with {text}; say how to cut with batch_dims= or split=, or make batches that fit"
