"""OOMGuard: recovery from out-of-memory for people with a loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.core.errors import OptionError
from penstock.device.oom import is_out_of_memory
from penstock.memory import microbatch
from penstock.memory.buffers import Buffers
from penstock.memory.coupled import Allowed, coupled_layers, coupled_words
from penstock.memory.explain import OutOfMemoryError, explain
from penstock.memory.failure import Failure, collect, insist, let_go
from penstock.memory.holdings import accelerators_of, drop_gradients
from penstock.memory.microbatch import Sizes, Split, split_batch
from penstock.memory.random_state import RandomState


class Attempt:
    """One try at a batch, as a context: an out-of-memory inside ends the try, and is not raised."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        """The micro-batches to go through, in order."""
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

    def let_go(self) -> None:
        """Free what the failure kept alive, now that it is not being handled any more."""
        if self._error is not None:
            let_go(self._error)
        self._error = None
        collect()


class OOMGuard:
    """Tries forward and backward of a batch until they fit: as they are, once more, then in smaller parts.

    Before each further try random states and buffers are as they were before the first, and there are no gradients.
    What a try made and your own function still refers to (`outputs`, `loss`) is not freed by a failure; keep the body
    of the loop in a function of its own.

    Args:
        model: whose buffers are put back.
        optimizer: whose gradients are dropped before a further try; the model's parameters' without one.
        micro_batch: the most samples at once to begin with; None for the whole batch.
        split: `(batch, parts) -> batches`.
        batch_size: `batch -> samples`.
        batch_coupled: layers that may be cut although they look at the whole batch; as for `TrainStep`.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> guard = OOMGuard(model)
        >>> import torch
        >>> batch = torch.ones(4, 3)
        >>> for attempt in guard.attempts(batch):
        ...     with attempt:
        ...         for part in attempt.parts:
        ...             (model(part).sum() / len(batch)).backward()
        >>> model.bias.grad.item()
        1.0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        micro_batch: int | None = None,
        split: Split = split_batch,
        batch_size: Callable[[Any], int] = microbatch.batch_size,
        batch_coupled: Allowed = (),
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise OptionError(f"micro_batch must be at least 1, not {micro_batch}")
        self._model = model
        self._optimizer = optimizer
        self._split = split
        self._batch_size = batch_size
        self._may_couple = batch_coupled
        self._sizes = Sizes(micro_batch)
        self._buffers = Buffers(model)
        self._devices = accelerators_of(model)

    def attempts(self, batch: Any) -> Iterator[Attempt]:
        """Yield tries, each to be entered with `with`, until one succeeds.

        Raises:
            OutOfMemoryError: a single sample does not fit, or the batch must not be cut.
        """
        size, bucket = self._batch_size(batch), microbatch.bucket_of(batch)
        before = RandomState.now(self._devices)
        self._insist(self._buffers.save)
        retried: set[int] = set()
        while True:
            parts = self._sizes.parts(bucket, size)
            attempt = Attempt(self._split(batch, parts) if parts > 1 else [batch])
            yield attempt
            micro_batch = -(-size // parts)
            if attempt.failure is None:
                self._sizes.succeeded(bucket, micro_batch)
                return
            attempt.let_go()
            self._drop_gradients()
            self._insist(self._buffers.restore)
            before.restore()
            self._go_on(attempt.failure, bucket, micro_batch, retried, is_cut=parts > 1)

    def _go_on(
        self, failure: Failure, bucket: tuple[Any, ...], micro_batch: int, retried: set[int], *, is_cut: bool
    ) -> None:
        coupled = coupled_layers(self._model, self._may_couple)
        if coupled and micro_batch in retried and not is_cut:
            raise OutOfMemoryError(
                f"{explain(failure, self._model, self._optimizer)}\nThe batch was not cut: {coupled_words(coupled)}."
            )
        if not self._sizes.shrink(bucket, micro_batch, retried):
            raise OutOfMemoryError(explain(failure, self._model, self._optimizer))

    def _insist(self, body: Callable[[], None]) -> None:
        failure = insist(body)
        if failure is not None:
            raise OutOfMemoryError(explain(failure, self._model, self._optimizer))

    def _drop_gradients(self) -> None:
        if self._optimizer is not None:
            drop_gradients(self._optimizer)
        else:
            self._model.zero_grad()
