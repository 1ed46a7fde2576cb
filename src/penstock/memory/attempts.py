"""BatchAttempts: attempts at a batch until it fits, with what a failed one has changed put back before the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from penstock.memory.cutting.cut_check import Comparison
from penstock.memory.cutting.cut_policy import CutPolicy, CutRefusedError
from penstock.memory.cutting.micro_batch import Cutting
from penstock.memory.cutting.split import bucket_of
from penstock.memory.explain import explain_failure
from penstock.memory.model_tensors import drop_input_gradients
from penstock.memory.recovery.out_of_memory import Failure, OutOfMemoryError, attempt, retry
from penstock.memory.recovery.snapshot import ChangedInPlaceError, Snapshot

T = TypeVar("T")


class BatchAttempts:
    """Runs a batch: whole, the same again, then in smaller parts.

    Before each further attempt all that `snapshot` knows is as it was before the first.

    Args:
        model: what is run.
        optimizer: of it, for a description of a failure.
        cutting: how batches are cut.
        comparison: of a whole batch with its parts.
        snapshot: of what an attempt changes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        cutting: Cutting,
        comparison: Comparison,
        snapshot: Snapshot,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._cutting, self._snapshot = cutting, snapshot
        self._policy = CutPolicy(model, cutting, comparison, self._explain)

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._policy.sizes.least_fitting()

    def run(self, batch: Any, body: Callable[[Sequence[Any]], T]) -> T | None:
        """Return what `body` returns for the parts of a batch, of which there is one if it fits.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
            OptionError: the batch must not be cut into parts of `micro_batch` samples.
        """
        policy = self._policy
        size, bucket = self._cutting.size_of(batch), bucket_of(batch)
        retried: set[int] = set()
        parts = 1

        def run() -> T:
            nonlocal parts
            parts = 1
            parts = policy.count_parts(batch, bucket, size)
            return body(self._cutting.cut(batch, parts) if parts > 1 else [batch])

        while True:
            self._retry(self._snapshot.save)
            try:
                result = attempt(run)
            except CutRefusedError as error:
                self._restore(batch)
                raise policy.refused(error, bucket) from error.__cause__
            except Exception as error:
                if policy.avoids_lone_samples(error, size, parts):
                    self._restore(batch)
                    continue
                explained = policy.of_a_cut(error, bucket, size, parts)
                if explained is None:
                    raise
                self._restore(batch)
                raise explained from error
            if result.failure is None:
                policy.record_success(bucket, -(-size // parts))
                self._retry(self._snapshot.learn)
                self._snapshot.discard()
                return result.value
            self._restore(batch)
            why = self._cutting.why_uncountable(batch) if len(retried) else ""
            if why:
                raise OutOfMemoryError(f"{self._explain(result.failure)}\nThe batch was not cut: {why}.")
            policy.record_failure(bucket, size, parts, result.failure, retried)

    def _restore(self, batch: Any) -> None:
        drop_input_gradients(batch)
        try:
            self._retry(self._snapshot.restore)
        except ChangedInPlaceError as error:
            raise OutOfMemoryError(f"memory ran out, and {error} (the optimizer's step belongs after it)") from None

    def _retry(self, body: Callable[[], None]) -> None:
        failure = retry(body).failure
        if failure is not None:
            raise OutOfMemoryError(self._explain(failure))

    def _explain(self, failure: Failure) -> str:
        return explain_failure(failure, self._model, self._optimizer)
