"""Samples of different lengths → one padded batch, written straight into a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock.core.errors import OptionError
from penstock.core.units import round_up
from penstock.loader.collate import arena_needed, collate_samples
from penstock.loader.transport.arena import ALIGNMENT, Arena, ArenaFullError
from penstock.loader.transport.codec import INLINE_NBYTES


class PadCollate:
    """A collate function for samples that are dicts: pads some fields to the longest of a batch.

    A padded field is an array, a tensor or a list of numbers; its last dimension differs from sample to sample, and
    becomes the batch's longest. Other fields become what torch's default_collate makes of them. In penstock's
    DataLoader the batch is written where it travels; in torch's it is an ordinary collate function.

    Args:
        pad: {field: value behind its end}, as in {"tokens": 0, "labels": -100}.
        multiple_of: the padded length is a multiple of it; tensor cores are faster with 8 or 64.
        dtypes: {field: dtype in the batch}; the samples' own where a field is not named.
        lengths: a field to add: how long each sample's first padded field was, as int64.

    Raises:
        OptionError: nothing to pad, or `multiple_of` is below 1; in a call: a field that is missing, not of numbers, or
            of shapes that differ elsewhere than at the end, or a value that its dtype does not have.

    Example:
        >>> collate = PadCollate({"x": 0}, multiple_of=4, lengths="n")
        >>> batch = collate([{"x": [1, 2, 3], "y": 5}, {"x": [4], "y": 6}])
        >>> batch["x"].tolist(), batch["y"].tolist(), batch["n"].tolist()
        ([[1, 2, 3, 0], [4, 0, 0, 0]], [5, 6], [3, 1])
    """

    def __init__(
        self,
        pad: Mapping[str, float],
        *,
        multiple_of: int = 1,
        dtypes: Mapping[str, torch.dtype] | None = None,
        lengths: str | None = None,
    ) -> None:
        if not pad or multiple_of < 1:
            raise OptionError(f"pad={pad!r} must name a field, and multiple_of={multiple_of} must be 1 or more")
        self._pad = dict(pad)
        self._multiple_of = multiple_of
        self._dtypes = dict(dtypes or {})
        self._lengths = lengths

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch, in new memory."""
        return self._batch(samples, self._read_fields(samples), None)

    def collate_into(self, samples: Sequence[Mapping[str, Any]], arena: Arena) -> dict[str, Any]:
        """Return the batch, in `arena` where that pays; penstock's workers call this.

        Raises:
            ArenaFullError: the arena is too small for it; nothing has been written.
        """
        fields = self._read_fields(samples)
        nbytes = sum(round_up(rows.nbytes, ALIGNMENT) for rows in fields.values())
        if nbytes <= INLINE_NBYTES:
            return self._batch(samples, fields, None)
        others, _ = arena_needed(self._others(samples[0]), len(samples))
        needed = arena.used + nbytes + others + ALIGNMENT
        if needed > arena.nbytes:
            raise ArenaFullError(needed)
        return self._batch(samples, fields, arena)

    def _read_fields(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, _PaddedField]:
        first = samples[0]
        if not isinstance(first, Mapping):
            raise OptionError(f"PadCollate takes samples that are dicts of fields, not {type(first).__qualname__}")
        return {name: self._rows(name, samples) for name in self._pad}

    def _rows(self, name: str, samples: Sequence[Mapping[str, Any]]) -> _PaddedField:
        try:
            values = [_array(sample[name]) for sample in samples]
        except KeyError:
            fields = ", ".join(map(repr, samples[0]))
            raise OptionError(f"pad= names {name!r}, which not every sample has; the first has {fields}") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionError(f"field {name!r} cannot be padded: {error}") from error
        heads = {value.shape[:-1] for value in values}
        if len(heads) > 1 or any(value.ndim == 0 for value in values):
            shapes = sorted({value.shape for value in values})[:4]
            raise OptionError(f"field {name!r} has shapes that differ elsewhere than at their end: {shapes}")
        filled = [value.dtype for value in values if value.size] or [values[0].dtype]
        dtype = _numpy_dtype(self._dtypes[name]) if name in self._dtypes else filled[0]
        for other in set(filled):
            if other != dtype and not np.can_cast(other, dtype, "safe" if name not in self._dtypes else "same_kind"):
                raise OptionError(f"field {name!r} is {other} in one sample, and {dtype} in the batch; pass dtypes=")
        fill = self._pad[name]
        if not np.can_cast(np.min_scalar_type(fill), dtype, "same_kind" if dtype.kind == "f" else "safe"):
            raise OptionError(
                f"{dtype} does not have pad={fill} of field {name!r}; pass dtypes={{{name!r}: torch.int64}}"
            )
        longest = round_up(max(value.shape[-1] for value in values), self._multiple_of)
        return _PaddedField(values, (len(values), *heads.pop(), longest), dtype, fill)

    def _others(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sample.items() if name not in self._pad}

    def _batch(
        self, samples: Sequence[Mapping[str, Any]], fields: dict[str, _PaddedField], arena: Arena | None
    ) -> dict[str, Any]:
        padded = {name: rows.write(arena) for name, rows in fields.items()}
        rest = [self._others(sample) for sample in samples]
        others: dict[str, Any] = {}
        if rest[0]:
            others = default_collate(rest) if arena is None else collate_samples(rest, arena)
        batch = {name: padded[name] if name in padded else others[name] for name in samples[0]}
        if self._lengths is not None:
            first = next(iter(fields.values()))
            batch[self._lengths] = torch.tensor([value.shape[-1] for value in first.values], dtype=torch.int64)
        return batch


@dataclass(frozen=True, slots=True)
class _PaddedField:
    """The values of one padded field, and its size in the batch."""

    values: list[np.ndarray]
    size: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: float

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.size)) * self.dtype.itemsize

    def write(self, arena: Arena | None) -> torch.Tensor:
        """Return the tensor, in `arena` if there is one."""
        dtype = torch.from_numpy(np.empty(0, self.dtype)).dtype
        tensor = torch.empty(self.size, dtype=dtype) if arena is None else arena.tensor(self.size, dtype)
        out = tensor.numpy()
        longest = self.size[-1]
        for row, value in enumerate(self.values):
            length = value.shape[-1]
            out[row, ..., :length] = value
            if length < longest:
                out[row, ..., length:] = self.fill
        return tensor


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"it holds {array.dtype}, not numbers")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise OptionError(f"dtypes= has {dtype}, which NumPy does not have; convert it in the training loop") from error
