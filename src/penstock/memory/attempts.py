"""Attempts at a batch until it fits, with what a failed one has changed put back before the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from penstock.memory.cutting.cut_check import Comparison
from penstock.memory.cutting.cut_policy import CutPolicy, CutRefusedError, RunningBatch
from penstock.memory.cutting.micro_batch import Cutting
from penstock.memory.explain import explain_failure
from penstock.memory.model_tensors import drop_input_gradients
from penstock.memory.recovery.out_of_memory import (
    AttemptResult,
    Failure,
    FailureLog,
    OutOfMemoryError,
    attempt,
    retry,
)
from penstock.memory.recovery.snapshot import ChangedInPlaceError, Snapshot

T = TypeVar("T")


def run_until_it_fits(
    policy: CutPolicy,
    attempt_once: Callable[[], AttemptResult[T] | None],
    running: Callable[[], RunningBatch],
    roll_back: Callable[[], None],
    log: FailureLog,
) -> T | None:
    """Attempt a batch: whole, the same again, then in smaller parts. Return what the attempt that succeeds returns.

    Args:
        policy: decides what follows a failure.
        attempt_once: cuts as the policy says, and runs; returns None where another rank's memory ran out.
        running: returns the batch that the last attempt ended in.
        roll_back: puts back what it has changed.
        log: records the failures.

    Raises:
        OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
        OptionError: the batch must not be cut into parts of `micro_batch` samples.
    """
    retried: set[int] = set()
    while True:
        try:
            result = attempt_once()
        except CutRefusedError as error:
            roll_back()
            raise policy.refused(error, running()) from error.__cause__
        except Exception as error:
            one = running()
            explained = None
            if not policy.avoids_lone_samples(error, one) and (explained := policy.of_a_cut(error, one)) is None:
                raise
            roll_back()
            if explained is not None:
                raise explained from error
            continue
        if result is not None and result.failure is None:
            return result.value
        one = running()
        if result is None:
            roll_back()
        else:
            assert result.failure is not None
            log.record(result.failure)
            roll_back()
            policy.record_failure(one, result.failure, retried)


class BatchAttempts:
    """Runs batches of a step that keeps nothing from one to the next.

    Args:
        model: what is run.
        optimizer: of it, for a description of a failure.
        cutting: how batches are cut.
        comparison: of a whole batch with its parts.
        snapshot: of what an attempt changes.
        log: records the failures.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        cutting: Cutting,
        comparison: Comparison,
        snapshot: Snapshot,
        log: FailureLog,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._cutting, self._snapshot, self._log = cutting, snapshot, log
        self._policy = CutPolicy(model, cutting, comparison, self._explain)

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._policy.sizes.least_fitting()

    def run(self, batch: Any, body: Callable[[Sequence[Any]], T]) -> T | None:
        """Return what `body` returns for the parts of a batch, of which there is one if it fits; see above."""
        one = RunningBatch(batch, self._cutting.size_of(batch))

        def run() -> T:
            one.parts = 1
            one.parts = self._policy.count_parts(one)
            return body(self._cutting.cut(batch, one.parts) if one.parts > 1 else [batch])

        def attempt_once() -> AttemptResult[T]:
            self._retry(self._snapshot.save)
            return attempt(run)

        found = run_until_it_fits(self._policy, attempt_once, lambda: one, lambda: self._restore(batch), self._log)
        self._policy.record_success(one)
        self._retry(self._snapshot.learn)
        self._snapshot.discard()
        return found

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
