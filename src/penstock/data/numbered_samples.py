"""`NumberedSamples`: samples by number, read alone, in batches and in order, with a position to resume from."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.core.errors import SourceError
from penstock.data.sample_batch import entered, plain_indices, samples_ahead
from penstock.data.sample_nbytes import nbytes_of
from penstock.data.schema import Schema, schema_of
from penstock.data.storage.object_batch import ObjectBatch, ObjectRequest

_BLOCK = 1024
_BLOCK_NBYTES = 1 << 20
"""Of samples in order that are read together."""
_STATE = 1


class NumberedSamples(Dataset[Any]):
    """What a `Source` has of samples, before others are made of it."""

    where = "this source"
    """Its path, for messages."""

    reads_batches = False
    """Whether `read_many` is faster than `read` for each: small samples, which are gathered."""

    _paths: Sequence[str] = ()
    """Of the files that samples are read from, where a format keeps them."""

    _start = 0
    _stop = 0
    _left: Iterator[Any] = iter(())
    """Of an iteration: the end of the block that was read, and what of it has not been returned."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Any:
        """Return sample `index`, an integer of `range(len(self))`.

        Raises:
            RecordError: it is truncated or corrupt.
        """
        raise NotImplementedError

    def read_many(self, indices: np.ndarray) -> list[Any]:
        """Return samples, with numbers of `range(len(self))`, as `read` does.

        Raises:
            SourceError: one of them is broken; `read` says which, and why.
        """
        return [self.read(index) for index in indices.tolist()]

    def read_range(self, start: int, stop: int) -> list[Any]:
        """Return samples from `start` to `stop`, or the first of them, as many as are read together with little work.

        Raises:
            SourceError: one of them is broken; `read` says which, and why.
        """
        return self.read_many(np.arange(start, stop))

    def path_of(self, index: int) -> str:
        """Return the path that a sample is read from, for messages, as far as it is known."""
        return self.where

    def read_paths(self) -> Sequence[str]:
        """Return the files and folders that samples are read from, by which a cache knows that they have changed."""
        return self._paths or [self.where]

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Return those samples for which `read_many` runs no library's code that a damaged file may crash.

        A crash is then in `read`, of the sample that is to blame.
        """
        return indices

    def __getitem__(self, index: int) -> Any:
        if entered.source is self:
            sample = entered.samples.pop(index, self)
            if sample is not self:
                return sample
        count, number = len(self), operator.index(index)
        if number < 0:
            number += count
        if not 0 <= number < count:
            raise IndexError(f"sample {index} of {self.where}, which has {count}")
        return self.read(number)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in order; from the position of `load_state_dict`, if that was called before."""
        start, self._start = self._start, 0
        end = len(self)
        size = 1 if self._gathers else end
        while start < end:
            stop = min(start + size, end)
            samples = self._together(self.read_range, start, stop)
            self._left = iter(samples or ())
            if samples is None:
                for index in range(start, stop):
                    self._stop = index + 1
                    yield self[index]
            else:
                size = max(1, min(_BLOCK, _BLOCK_NBYTES // max(1, nbytes_of(samples[-1]))))
                self._stop = stop = start + len(samples)
                del samples
                yield from self._left
            start = stop
        self._stop = 0

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the position of an iteration, without the samples that it has read ahead."""
        state = {**self.__dict__, "_stop": self._position}
        state.pop("_left", None)
        return state

    @property
    def _gathers(self) -> bool:
        return self.reads_batches and not self.parts

    def read_block(self, block: range) -> list[Any] | None:
        """Return samples that are read together; None where they have to be read alone, or one of them is broken."""
        return self._together(self.read_many, np.arange(block.start, block.stop, block.step))

    def _together(self, read: Callable[..., list[Any]], *arguments: Any) -> list[Any] | None:
        try:
            return read(*arguments) if self._gathers else None
        except SourceError:  # raised again by the sample that it belongs to
            return None

    @property
    def _position(self) -> int:
        """How many samples the iteration has returned."""
        return self._stop - operator.length_hint(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this process's iteration. With a sampler, take the sampler's state instead."""
        return {"version": _STATE, "of": len(self), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration where `state` was taken.

        Raises:
            SourceError: it is the state of another source.
        """
        if (state.get("version"), state.get("of")) != (_STATE, len(self)):
            raise SourceError(f"this is no state of {self.where}, with {len(self)} samples: {str(state)[:200]}")
        self._start = self._stop = int(state["position"])
        self._left = iter(())

    @property
    def schema(self) -> Schema:
        """The fields of its samples; those of the first sample if the format stores none for all."""
        if not len(self):
            raise SourceError(f"{self.where} has no samples, and so no fields")
        return schema_of(self[0], self.where)

    @property
    def chunk_starts(self) -> np.ndarray | None:
        """Where each chunk of samples that are read together begins, and the number of samples; None without chunks."""
        return None

    @property
    def reads_objects(self) -> bool:
        """Whether samples are made of small remote files that can be fetched side by side, see `fetching`."""
        return False

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        """Return the remote files that `read` reads whole for these samples, all of `range(len(self))`, in order."""
        return []

    def fetching(self, indices: Iterable[int]) -> AbstractContextManager[Any]:
        """Read these samples together, or their remote files side by side, for `self[index]` in the `with` block.

        It has an effect in this thread. The samples are the same as without, in the same order, and so are errors. Does
        nothing for other sources.
        """
        if self.reads_batches:
            return samples_ahead(self, indices)
        if not self.reads_objects:
            return ObjectBatch([])
        places = range(len(self))
        try:
            known = [places[index] for index in indices if -len(places) <= index < len(places)]
        except TypeError:  # reading it raises what it raises without a batch
            known = []
        return ObjectBatch(self.object_requests(known))

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]] | None:
        """Samples of a batch, as torch's DataLoader asks for them; None where they are as fast one by one."""
        return self._read_batch if self.reads_objects or self.reads_batches else None

    def _read_batch(self, indices: Sequence[int]) -> list[Any]:
        known = plain_indices(indices) if self._gathers else None
        if known is not None and len(known) and known.view(np.uint64).max() < len(self):  # negative ones are huge
            found = self._together(self.read_many, known)
            if found is not None:
                return found
        samples = []
        with self.fetching(indices):
            for index in indices:
                try:
                    samples.append(self[index])
                except Exception as error:
                    error.add_note(f"(penstock: raised for sample {index} of {self.where})")
                    raise
        return samples

    @property
    def parts(self) -> tuple[Any, ...]:
        """What its samples are made with, of which each may be a source: none for a format."""
        return ()

    @property
    def decodes_on(self) -> torch.device | None:
        """The GPU that samples are decoded on, by the training process alone; None for the host."""
        found = (part.decodes_on for part in self.parts if isinstance(part, NumberedSamples))
        return next((device for device in found if device is not None), None)

    def set_epoch(self, epoch: int) -> None:
        """Have the samples of another epoch: of the mixtures in it. Other sources have the same in each."""
        for part in self.parts:
            if isinstance(part, NumberedSamples):
                part.set_epoch(epoch)

    @property
    def is_epoch_set(self) -> bool:
        """Whether `set_epoch` was called since the last pass began: of a mixture in it."""
        return any(part.is_epoch_set for part in self.parts if isinstance(part, NumberedSamples))

    def begin_epoch(self, number: int) -> int | None:
        """Begin a pass: penstock's DataLoader calls it before its workers do.

        Args:
            number: of the epoch, if `set_epoch` was not called since the pass before.

        Returns:
            The epoch whose samples it has now; None where all epochs have the same.
        """
        for part in self.parts:
            if isinstance(part, NumberedSamples):
                part.begin_epoch(number)
        return self.epoch

    @property
    def epoch(self) -> int | None:
        """The epoch whose samples it has now; None where all epochs have the same."""
        epochs = (part.epoch for part in self.parts if isinstance(part, NumberedSamples))
        return next((epoch for epoch in epochs if epoch is not None), None)

    def close(self) -> None:
        """Close what this process has opened; it is opened again when it is needed."""
