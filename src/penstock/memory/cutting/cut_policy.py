"""CutPolicy: whether and how a batch is cut, the same for every step.

A cut that changes the result, as far as that is known, is refused with what to change. One that was compared and agrees
is made. One that could not be compared is made with a warning, once. What was learned about sizes is forgotten when a
cut is refused or fails in another way, so that a batch that fits later is run whole again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.core.errors import OptionError, PenstockError
from penstock.device.oom import is_out_of_memory
from penstock.memory.cutting.cut_check import Comparison, CutCheck
from penstock.memory.cutting.micro_batch import Cutting, MicroBatchSizes
from penstock.memory.cutting.split import (
    batch_dependent_layers,
    bucket_of,
    explain_batch_dependence,
)
from penstock.memory.recovery.out_of_memory import Failure, OutOfMemoryError, attempt, clear_frames, free_memory

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


@dataclass(eq=False)
class RunningBatch:
    """A batch that is attempted."""

    batch: Any
    size: int
    """Its samples."""
    parts: int = 1
    """How many it was cut into, the last time."""

    @functools.cached_property
    def bucket(self) -> Bucket:
        """Batches of one bucket need about the same memory per sample."""
        return bucket_of(self.batch)

    @property
    def micro_batch(self) -> int:
        """Samples in its largest part."""
        return -(-self.size // self.parts)


class CutPolicy:
    """Decides for one step.

    Args:
        model: what the step runs.
        cutting: how batches are cut.
        comparison: compares a whole batch with its parts; None where ranks would have to meet for that.
        explain: describes a failure.
    """

    def __init__(
        self,
        model: nn.Module,
        cutting: Cutting,
        comparison: Comparison | None,
        explain: Explain,
    ) -> None:
        self._model, self._cutting, self._comparison, self._explain = model, cutting, comparison, explain
        self.sizes = MicroBatchSizes(cutting.micro_batch)
        self._failures: dict[Bucket, Failure] = {}
        """What made batches be cut."""
        self._least = 1
        """The fewest samples in a part of a batch that is cut."""
        self._tries = 0
        """How often a comparison was tried and not possible."""
        self._has_warned = False
        self._refused: dict[Bucket, str] = {}

    # ── before an attempt ───────────────────────────────────────────────────────────────────────────────────

    def count_parts(self, one: RunningBatch) -> int:
        """Return into how many parts to cut a batch, by what is known to fit.

        Raises:
            CutRefusedError: it must not be cut.
        """
        if not self.sizes.is_limited:
            return 1
        size = one.size
        parts = self.sizes.count_parts(one.bucket, size)
        if self._least > 1 and parts > max(1, size // self._least):
            parts = max(1, size // self._least)
            limit = self._cutting.micro_batch
            if limit is not None and -(-size // parts) > limit:
                raise CutRefusedError(
                    f"in parts of {limit} samples, one of its {size} would be alone, and a batch norm has no variance "
                    "of a single sample; choose a larger micro_batch="
                )
        self.check(one, parts)
        return parts

    def check(self, one: RunningBatch, parts: int) -> None:
        """Raise CutRefusedError where a batch must not be cut into so many parts."""
        if parts == 1:
            return
        if why := self._refused.get(one.bucket) or self._why_never(one):
            raise CutRefusedError(why)
        if self._cutting.is_allowed or batch_dependent_layers(self._model):
            return
        if self._comparison is None:
            self._warn("the ranks of a sharded model would have to meet to compare the gradients; see check()")
            return
        try:
            found = self._compare(self._comparison, one, self._cutting.cut(one.batch, parts))
        except Exception as error:
            if is_out_of_memory(error) or not self._has_failed(one.bucket):
                error.add_note(f"this batch of {one.size} samples was cut into {parts} parts: batch_dims= or split=")
                raise
            raise CutRefusedError(str(error) if isinstance(error, OptionError) else _of_a_part(error)) from error
        self._judge(found, one.bucket)

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

    def _why_never(self, one: RunningBatch) -> str:
        """Return why a batch must not be cut, whatever a comparison would say; empty where it may be."""
        if why := self._cutting.why_uncountable(one.batch):
            return why
        if self._cutting.is_allowed:
            return ""
        if dependent := batch_dependent_layers(self._model, self._cutting.allow_batch_dependent):
            return explain_batch_dependence(dependent)
        return ""

    def _compare(self, comparison: Comparison, one: RunningBatch, cut: Any) -> CutCheck | str | None:
        """Compare a part that fits; the smaller the less memory there is. None where nothing is left to compare."""
        batch, size = one.batch, one.size
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

    def record_success(self, one: RunningBatch) -> None:
        """Record that the parts of a batch fitted."""
        if self.sizes.is_limited:
            self.sizes.record_success(one.bucket, one.micro_batch)

    def record_failure(self, one: RunningBatch, failure: Failure, retried: set[int]) -> None:
        """Record that memory ran out; the next attempt follows.

        Raises:
            OutOfMemoryError: nothing is left to try.
        """
        self._failures[one.bucket] = failure
        why = self._cutting.why_uncountable(one.batch) if retried else ""
        if one.micro_batch in retried and one.parts > 1 and self._least > 1 and one.parts == one.size // self._least:
            why = "it was not cut further, as a batch norm has no variance of a single sample"
        if why or not self.sizes.retry_or_shrink(one.bucket, one.micro_batch, retried):
            self.sizes.forget(one.bucket)
            raise OutOfMemoryError(self._explain(failure) + (f"\nThe batch was not cut: {why}." if why else ""))

    def refused(self, error: CutRefusedError, one: RunningBatch) -> PenstockError:
        """Return the error to raise for a cut that is refused, and forget what made it necessary."""
        if not self._has_failed(one.bucket):
            return OptionError(f"this batch would be cut into micro-batches, and {error}")
        self.sizes.forget(one.bucket)
        return OutOfMemoryError(f"{self._explain(self._failures[one.bucket])}\nThe batch was not cut: {error}.")

    def of_a_cut(self, error: Exception, one: RunningBatch) -> OutOfMemoryError | None:
        """Return what to raise for a batch that was cut for memory and fails in another way; None if cuts went well."""
        if one.parts == 1 or isinstance(error, PenstockError) or not self.sizes.is_untried(one.bucket):
            return None
        self.sizes.forget(one.bucket)
        why = f"{one.size} samples were cut into {one.parts} parts for that, and {_of_a_part(error)}"
        return OutOfMemoryError(f"{self._explain(self._failures[one.bucket])}\n{why}.")

    def avoids_lone_samples(self, error: Exception, one: RunningBatch) -> bool:
        """Cut into parts of two samples at least, if an error says that a batch norm was given a single value.

        Return whether that changes how the batch is cut. Ranks of a sharded model would have to agree on it.
        """
        if self._comparison is None or self._least > 1 or _ONE_VALUE not in str(error):
            return False
        if one.parts <= max(1, one.size // 2):
            return False
        clear_frames(error)
        free_memory()
        self._least = 2
        return True

    def _has_failed(self, bucket: Bucket) -> bool:
        """Return whether batches of a bucket are cut because memory ran out."""
        return bucket in self._failures and self.sizes.has_failed(bucket)


def _of_a_part(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"a part fails with {text}; say how to cut with batch_dims= or split=, or make batches that fit"
