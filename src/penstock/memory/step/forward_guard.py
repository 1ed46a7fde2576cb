"""ForwardGuard: attempts at a batch until they fit, with what a failed one has changed put back before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from penstock.device.oom import is_out_of_memory
from penstock.memory.explain import OutOfMemoryError, explain_failure
from penstock.memory.microbatch.cutting import Cutting
from penstock.memory.microbatch.size_search import MicroBatchSizes
from penstock.memory.microbatch.split import (
    batch_dependent_layers,
    bucket_of,
    explain_batch_dependence,
    explain_single_row,
    mixes_single_rows,
)
from penstock.memory.model_tensors import accelerators_of, drop_input_gradients
from penstock.memory.recovery.attempt import clear_frames, free_memory, retry
from penstock.memory.recovery.failure import Failure
from penstock.memory.recovery.random_state import RandomState
from penstock.memory.recovery.saved_buffers import SavedBuffers
from penstock.memory.recovery.watched_state import ChangedInPlaceError, WatchedState


class Attempt:
    """One try at a batch, as a context: an out-of-memory inside ends the try, and is not raised."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        """The micro-batches to run, in order."""
        self.failure: Failure | None = None
        """What ended the try, if it did not succeed."""
        self._error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.failure = Failure.of(error)
        self._error = error
        return True

    def release(self) -> None:
        """Free what the failure kept alive; called when its exception is not being handled any more."""
        if self._error is not None:
            clear_frames(self._error)
        self._error = None
        free_memory()


class ForwardGuard:
    """Tries a batch until it fits: whole, the same again, then in smaller parts.

    Before each further try random states, buffers and what is watched are as they were before the first.

    Args:
        model: whose buffers are restored.
        cutting: how batches are cut.
    """

    def __init__(self, model: nn.Module, cutting: Cutting) -> None:
        self._model = model
        self._cutting = cutting
        self._sizes = MicroBatchSizes(cutting.micro_batch)
        self._modules = cutting.modules_with(model)
        self._buffers = SavedBuffers(*self._modules)
        self._devices = accelerators_of(model)
        # an optimizer's step inside of an attempt must not pass for a change that can be put back
        self._watched = WatchedState(model, None, cutting.also, is_watching=True, copies_params=False)

    def attempts(self, batch: Any) -> Iterator[Attempt]:
        """Yield tries, each to be entered with `with`, until one succeeds.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
        """
        size, bucket = self._cutting.count(batch), bucket_of(batch)
        before = RandomState.now(self._devices)
        self._save()
        self._retry(self._buffers.save)
        self._retry(self._watched.save)
        retried: set[int] = set()
        while True:
            parts = self._sizes.count_parts(bucket, size)
            attempt = Attempt(self._cutting.cut(batch, parts) if parts > 1 else [batch])
            yield attempt
            micro_batch = -(-size // parts)
            if attempt.failure is None:
                self._sizes.record_success(bucket, micro_batch)
                self._retry(self._watched.learn)
                self._watched.discard()
                self._discard()
                return
            attempt.release()
            self._restore()
            drop_input_gradients(batch)
            self._retry(self._buffers.restore)
            self._restore_watched()
            before.restore()
            if parts == 1 and micro_batch in retried:
                self._check_may_cut(batch, size, attempt.failure)
            if not self._sizes.retry_or_shrink(bucket, micro_batch, retried):
                raise OutOfMemoryError(self._explain(attempt.failure))

    @property
    def largest_fitting(self) -> int | None:
        """The most samples at once that are believed to fit, of the largest ones; None while nothing has failed."""
        return self._sizes.least_fitting()

    def _save(self) -> None:
        """Save what else an attempt changes."""

    def _restore(self) -> None:
        """Restore it after an attempt that has failed."""

    def _discard(self) -> None:
        """Forget it after one that has not."""

    def _check_may_cut(self, batch: Any, size: int, failure: Failure) -> None:
        dependent = batch_dependent_layers(self._model, self._cutting.allow_batch_dependent)
        why = explain_batch_dependence(dependent) if dependent else ""
        if not why and self._cutting.is_guessed and mixes_single_rows(batch, size):
            why = explain_single_row(size, is_known=False)
        if why:
            raise OutOfMemoryError(f"{self._explain(failure)}\nThe batch was not cut: {why}.")

    def _restore_watched(self) -> None:
        try:
            self._retry(self._watched.restore)
        except ChangedInPlaceError as error:
            raise OutOfMemoryError(
                f"memory ran out, and {error} (the optimizer's step belongs after the loop)"
            ) from None

    def _retry(self, body: Callable[[], None]) -> None:
        failure = retry(body).failure
        if failure is not None:
            raise OutOfMemoryError(self._explain(failure))

    def _explain(self, failure: Failure) -> str:
        return explain_failure(failure, self._model, None)
