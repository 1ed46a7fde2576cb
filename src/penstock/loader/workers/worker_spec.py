"""What a worker needs to know to make batches: the dataset, how to collate, and what to do about samples that raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from penstock.data.source import Source
from penstock.data.storage.object_batch import BatchChain, ObjectBatch


class Skip:
    """What an `errors=` callable returns to leave a sample out; the only one is `SKIP`."""

    def __reduce__(self) -> str:
        return "SKIP"

    def __repr__(self) -> str:
        return "penstock.SKIP"


SKIP = Skip()

Prefetch = Callable[[Any], ObjectBatch | None]
"""Requests the remote files of samples, by their indices; what it returns is entered to read them, or closed."""

ErrorPolicy = Literal["raise", "skip"] | Callable[[Exception, Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker needs to make batches; it travels to worker processes."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    iterable: bool
    auto_collation: bool
    drop_last: bool
    init_fn: Callable[[int], Any] | None = None
    """The loader's worker_init_fn. It travels with the dataset, because it may be a method of it."""
    errors: ErrorPolicy = "raise"
    seeded: bool = False
    """Whether each sample is made with random states of its own seed; see `sample_seed`."""

    @property
    def makes_whole_batches(self) -> bool:
        """Whether the dataset is asked for all samples of a batch at once, as torch asks it."""
        if not self.auto_collation or self.iterable or self.fetching is not None:
            return False
        return bool(getattr(self.dataset, "__getitems__", None))

    @property
    def fetching(self) -> Callable[[Sequence[Any]], AbstractContextManager[Any]] | None:
        """How what a batch is made of is fetched, so that its samples are then made one by one; None for most."""
        dataset = self.dataset
        is_own = isinstance(dataset, Source) and type(dataset).__getitems__ is Source.__getitems__
        return dataset.fetching if is_own and (dataset.reads_objects or dataset.reads_batches) else None

    @property
    def prefetch(self) -> Prefetch | None:
        """How the remote files of batches are requested ahead, those of one batch after the other; None for most."""
        fetching, chain = self.fetching, BatchChain()
        if fetching is None or not self.dataset.reads_objects or not self.auto_collation:
            return None

        def prefetch(indices: Any) -> ObjectBatch | None:
            batch = fetching(indices if isinstance(indices, list) else [*indices])
            if not isinstance(batch, ObjectBatch):
                return None
            batch.start(chain)
            return batch

        return prefetch


def is_stateful(candidate: Any) -> bool:
    """Return whether an object has both `state_dict` and `load_state_dict`.

    A `Source` has them for those who iterate it, which no loader does: samples read by number have no position.
    """
    if getattr(type(candidate), "state_dict", None) is Source.state_dict:
        return False
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))
