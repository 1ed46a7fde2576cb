"""`mix`: one source of several, with weights."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset

from penstock.core.errors import OptionError
from penstock.core.shared_bytes import SharedBytes, attached_or_new
from penstock.core.units import to_epoch
from penstock.data.mixture_order import MixtureOrder, Stop
from penstock.data.open import open as open_source
from penstock.data.source import Source
from penstock.data.storage.object_batch import ObjectRequest


def mix(
    sources: Mapping[Any, float] | Iterable[tuple[Any, float]],
    *,
    seed: int = 0,
    stop: Stop = "first_exhausted",
    length: int | None = None,
    shuffle: bool = False,
    schedule: Mapping[int, Sequence[float]] | None = None,
    epochs: Sequence[float] | None = None,
    lengths: Sequence[float | Sequence[int]] | None = None,
) -> Mixture:
    """Return a source of several sources' samples, in which each comes as often as its weight says.

    Which sample stands at position i depends on nothing but `seed`, the epoch and i, so that the mixture is the same
    with any number of workers and ranks, and resumes exactly, in torch's DataLoader too. How often a source comes is
    not drawn: after every block of about 1 024 samples (fewer in small mixtures) it has given what its weight says, to
    within one or two samples. Within a block the order is random.

    An epoch continues each source where the epoch before has left it, and begins it anew when it has ended: no sample
    comes a second time before all others of its source have come. `penstock.DataLoader` counts epochs by itself; with
    another loader, call `mixture.set_epoch(epoch)` before each pass (its workers see it, also if they persist). A
    mixture is in one epoch at a time: loops that run at the same time need one each (`copy.deepcopy(mixture)`).

    Args:
        sources: a weight (of any scale) for each source, as a dict or as pairs. A source is one that `penstock.open`
            returns, its path, or any dataset with `__len__` and `__getitem__`.
        seed: of the order.
        stop: where an epoch ends.

            - "first_exhausted": when a source has given all of its samples.
            - "all_exhausted": when all have; those that end before begin again.
            - "all_exhausted_without_replacement": the same, but those that have ended give no more: every sample comes
              once.
            - "never": after `length` samples; sources begin again when they end.

        length: samples in an epoch, for "never".
        shuffle: read each source in a random order, another one each time it begins again. Without it, sources are
            read in their own order, which suits those that are stored in chunks.
        schedule: weights that change within an epoch: {position: the weight of each source from there on}. A weight
            may be 0 for the time being, also at the beginning: no samples of that source.
        epochs: how many passes over each source are "all of its samples", by `stop`; a half is 0.5, and 1 is usual.
            With "all_exhausted_without_replacement" each source gives exactly so many.
        lengths: weights are parts of all tokens (or whatever these count), not of samples: for each source how many its
            samples have, as a sequence, or their mean. Of whole passes over a source the tokens are exactly what its
            weight says; of a part of one, if its samples have the mean length there (`shuffle=True`, on average).

    Raises:
        OptionError: a weight is not positive, a source is empty, has no samples by number or is a mixture, or an option
            is none.

    >>> import penstock
    >>> [*penstock.mix([(["a"], 1), (["b"], 1)], stop="never", length=8, schedule={4: [0, 1]})][4:]
    ['b', 'b', 'b', 'b']
    >>> mixture = penstock.mix([(["a0", "a1", "a2", "a3", "a4", "a5"], 3), (["b0", "b1"], 1)], seed=1)
    >>> [*mixture], mixture.counts, mixture.locate(2)
    (['a0', 'a1', 'b0', 'a2', 'a3', 'a4', 'b1'], (5, 2), (1, 0))
    """
    pairs = _pairs(sources)
    seed, length = _whole("seed", seed), None if length is None else _whole("length", length)
    _check_stop(stop, length)
    opened = [_source(source) for source, _ in pairs]
    sizes = [len(source) for source in opened]
    if not all(sizes):
        raise OptionError(f"source {sizes.index(0)} of this mixture has no samples; leave it out")
    changes = _changes(schedule or {}, len(sizes), length)
    weights = [
        _number(weight, f"the weight of source {place}", or_zero=any(later[place] for later in changes.values()))
        for place, (_, weight) in enumerate(pairs)
    ]
    if not any(weights):
        raise OptionError("all weights of this mixture are 0 at its beginning, so it has no first sample; raise one")
    if lengths is not None:
        means = _means(lengths, sizes)
        weights, *later = (
            [weight / mean for weight, mean in zip(one, means, strict=True)] for one in (weights, *changes.values())
        )
        changes = dict(zip(changes, later, strict=True))
    order = MixtureOrder(
        weights,
        sizes,
        seed=seed,
        stop=stop,
        length=length,
        shuffle=shuffle,
        limits=None if epochs is None else _limits(epochs, sizes, stop),
        schedule=changes,
    )
    return Mixture(opened, order)


def _pairs(sources: Any) -> list[tuple[Any, Any]]:
    try:
        pairs = [(source, weight) for source, weight in (sources.items() if isinstance(sources, Mapping) else sources)]
    except (TypeError, ValueError) as error:
        raise OptionError(
            "a mixture is made of {source: weight, ...} or of pairs, [(source, weight), ...], and something in "
            f"{type(sources).__qualname__} is no pair: {error}"
        ) from error
    if not pairs:
        raise OptionError("a mixture needs at least one source")
    return pairs


def _check_stop(stop: str, length: int | None) -> None:
    if stop not in get_args(Stop):
        raise OptionError(f"stop must be one of {', '.join(map(repr, get_args(Stop)))}, not {stop!r}")
    if (stop == "never") != (length is not None):
        raise OptionError(
            f"stop={stop!r} and length={length!r} do not go together: a mixture that never stops needs the length of "
            'an epoch (stop="never", length=100_000), and with any other rule the sources decide it'
        )
    if length is not None and length < 1:
        raise OptionError(f"length must be at least 1, not {length}")


def _changes(schedule: Any, sources: int, length: int | None) -> dict[int, list[Fraction]]:
    try:
        if any(isinstance(later, Mapping) for later in schedule.values()):
            raise TypeError("weights by name instead of in the order of the sources")
        changes = {_plain(position): [*later] for position, later in schedule.items()}
    except (AttributeError, TypeError) as error:
        raise OptionError(
            "schedule is {position: [the weight of each source, in their order], ...}, and this is none: "
            f"{schedule!r} ({error})"
        ) from error
    exact = {}
    for position, weights in changes.items():
        if not isinstance(position, int) or not 0 < position < (length or math.inf):
            raise OptionError(
                f"schedule: weights change at a position of an epoch, a whole number from 1 on"
                f"{f' and below length={length}' if length else ''}, not at {position!r}"
            )
        exact[position] = [
            _number(weight, f"schedule: the weight of source {place} from position {position} on", or_zero=True)
            for place, weight in enumerate(weights)
        ]
        if len(weights) != sources or not any(exact[position]):
            raise OptionError(
                f"schedule: from position {position} on each of the {sources} sources needs a weight of 0 or more, and "
                f"one of them more than 0, not {weights!r}"
            )
    return exact


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise OptionError(f"{name} must be a whole number, not {value!r}") from None


def _plain(number: Any) -> Any:
    """Return a number of Python's: NumPy's overflow in fractions, and torch's are none for them."""
    return number.item() if isinstance(number, np.generic | torch.Tensor) else number


def _means(lengths: Sequence[float | Sequence[int]], sizes: list[int]) -> list[Fraction]:
    _check_each("lengths", lengths, sizes)
    means = []
    for place, (one, size) in enumerate(zip(lengths, sizes, strict=True)):
        if np.iterable(one):
            means.append(_number(_total(one, place, size), f"the tokens of source {place}") / size)
        else:
            means.append(_number(one, f"the mean length of source {place}"))
    return means


def _total(lengths: Any, place: int, size: int) -> int | float:
    """Return the sum of the lengths of a source's samples."""
    if isinstance(lengths, torch.Tensor):
        lengths = (lengths.double() if lengths.is_floating_point() else lengths).detach().cpu().numpy()
    try:
        array = np.asarray(lengths)
        array = array.astype(np.float64) if array.dtype.kind == "O" else array
    except (TypeError, ValueError):  # no numbers, or of different shapes
        array = np.empty(0)
    if array.shape != (size,) or array.dtype.kind not in "biuf" or array.min() < 0:
        raise OptionError(f"lengths: source {place} needs one of 0 or more for each of its {size} samples")
    total = float(array.sum(dtype=np.float64))
    return total if array.dtype.kind == "f" or total >= 1 << 62 else int(array.sum(dtype=np.int64))


def _limits(epochs: Sequence[float], sizes: list[int], stop: Stop) -> list[int]:
    """Return how many samples of each source are so many passes over it."""
    _check_each("epochs", epochs, sizes)
    if stop == "never":
        raise OptionError('epochs= says when a source has ended, and a mixture with stop="never" does not ask')
    passes = [_number(one, f"epochs of source {place}") for place, one in enumerate(epochs)]
    return [max(1, round(one * size)) for one, size in zip(passes, sizes, strict=True)]


def _check_each(name: str, values: Sequence[Any], sizes: list[int]) -> None:
    count = len(values) if hasattr(values, "__len__") else f"only {values!r}"
    if count != len(sizes):
        raise OptionError(f"{name}: each of the {len(sizes)} sources needs one, and there are {count}")


def _source(source: Any) -> Any:
    found = open_source(source) if isinstance(source, str | os.PathLike) else source
    has_numbers = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if isinstance(found, IterableDataset) or not has_numbers:
        raise OptionError(
            f"a mixture takes samples by number (__getitem__ and __len__), and a {type(found).__qualname__} has none; "
            "open it with index=True, or convert it to a format that has them"
        )
    if isinstance(found, Source) and found.epoch is not None:
        raise OptionError(
            "a source of this mixture is a mixture itself, or has one in it, which would give the samples of one epoch "
            "again and again; give its sources to this mixture, each with the inner mixture's weight times its part of "
            "the weights there: [(web, 0.8), (inner, 0.2)], with [(code, 3), (books, 1)] in inner, is [(web, 0.8), "
            "(code, 0.15), (books, 0.05)]"
        )
    return found


def _number(value: Any, name: str, *, or_zero: bool = False) -> Fraction:
    try:
        if math.isfinite(value) and (value > 0 or (or_zero and value == 0)):
            return Fraction(_plain(value))
    except OverflowError:
        most = f"{sys.float_info.max:.1e}"
        raise OptionError(f"{name} must be a number of at most {most}, and this one is larger; scale it down") from None
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several is no number either
        pass
    wanted = "a number of 0 or more" if or_zero else "a positive number"
    raise OptionError(f"{name} must be {wanted}, not {value!r}; leave out what is not wanted")


class Mixture(Source):
    """Samples of several sources; `mix` makes it.

    Args:
        sources: each with `__len__` and `__getitem__`.
        order: which sample of which source stands where.
    """

    def __init__(self, sources: Sequence[Any], order: MixtureOrder) -> None:
        self.where = f"a mixture of {len(sources)} sources (order {order.digest})"
        self._sources = tuple(sources)
        self._order = order
        self._epoch = _SharedNumber(0)
        self._is_epoch_set = False

    def __len__(self) -> int:
        return len(self._order)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its sources."""
        return self._sources

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each source in an epoch. More than it has are passes over it: `counts[0] / len(source)`."""
        return self._order.counts

    @property
    def epoch(self) -> int:
        """Which epoch's samples it has now."""
        return self._epoch.value

    @property
    def is_epoch_set(self) -> bool:
        """Whether `set_epoch` was called since the last pass began."""
        return self._is_epoch_set

    def set_epoch(self, epoch: int) -> None:
        """Have the samples of another epoch, in this process and in workers; not while a loop reads them.

        The next pass of penstock's DataLoader is that of this epoch, and it counts on from there.
        """
        self._epoch.value = to_epoch(epoch)
        self._is_epoch_set = True

    def begin_epoch(self, number: int) -> int:
        """Begin the pass of epoch `number`, or of that which `set_epoch` has said; return which it is."""
        if not self._is_epoch_set:
            self._epoch.value = number
        self._is_epoch_set = False
        return self.epoch

    def locate(self, index: int) -> tuple[int, int]:
        """Return which source has sample `index`, and its number there."""
        return self._order.locate(range(len(self))[index], self._epoch.value)

    @property
    def reads_objects(self) -> bool:
        """Whether a source does."""
        return any(isinstance(source, Source) and source.reads_objects for source in self._sources)

    def object_requests(self, indices: Sequence[int]) -> list[ObjectRequest]:
        """Return those of the sources, in the order of the samples."""
        found = []
        for index in indices:
            place, number = self._order.locate(index, self._epoch.value)
            source = self._sources[place]
            if isinstance(source, Source) and source.reads_objects:
                found += source.object_requests([number])
        return found

    def read(self, index: int) -> Any:
        """Return a sample of a source."""
        source, number = self._order.locate(index, self._epoch.value)
        return self._sources[source][number]

    def close(self) -> None:
        """Close the sources."""
        for source in self._sources:
            if isinstance(source, Source):
                source.close()


class _SharedNumber:
    """An integer that all processes see which have a pickle or a fork of it; far from where it was made, its copy."""

    def __init__(self, value: int, memory: SharedBytes | None = None) -> None:
        self._memory = SharedBytes(8) if memory is None else memory
        self._cell = np.frombuffer(self._memory.memory, np.int64)
        if memory is None:
            self.value = value

    @property
    def value(self) -> int:
        return int(self._cell[0])

    @value.setter
    def value(self, value: int) -> None:
        self._cell[0] = value

    def __reduce__(self) -> Any:
        return attached_or_new, (_SharedNumber, *self._memory.__reduce__(), self.value)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedNumber:
        return _SharedNumber(self.value)
