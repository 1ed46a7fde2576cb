"""`CachedDataset`: a map-style dataset whose samples are made once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from penstock.core.errors import OptionError
from penstock.data.sample_cache.dataset_identity import fingerprint
from penstock.data.sample_cache.sample_cache import CacheInfo, SampleCache, Where, open_cache
from penstock.distributed.rank import Distributed


def open_cached(
    dataset: Any, *, where: Where, limit: int | str | None, path: Any, distributed: Distributed
) -> CachedDataset:
    """Return a dataset that makes each sample of `dataset` once; see `penstock.cached`."""
    name = type(dataset).__qualname__
    has_state = all(callable(getattr(dataset, one, None)) for one in ("state_dict", "load_state_dict"))
    if has_state and not hasattr(type(dataset), "read_paths"):  # a source has one for those who iterate it
        raise OptionError(
            f"{name} has a state (state_dict), which a sample that is read from a cache would not move on; cache a "
            "dataset without one inside of it"
        )
    if isinstance(dataset, IterableDataset) or not all(hasattr(dataset, one) for one in ("__getitem__", "__len__")):
        raise OptionError(
            f"a cache keeps samples by number (__getitem__ and __len__), and a {name} has none; open it with "
            "index=True, or convert it to a format that has them"
        )
    cache = open_cache(where, len(dataset), limit, path, lambda: fingerprint(dataset), distributed)
    return CachedDataset(dataset, cache)


class CachedDataset(Dataset[Any]):
    """Samples of another dataset, each made once; `penstock.cached` makes it."""

    def __init__(self, dataset: Any, cache: SampleCache) -> None:
        self.dataset = dataset
        self._cache = cache

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        number = self._number(index)
        if number is None:
            return self.dataset[index]
        return self._cache.get(number, lambda: self.dataset[number])

    def _number(self, index: Any) -> int | None:
        if type(index) is not int:
            try:
                index = None if isinstance(index, bool) else operator.index(index)
            except TypeError:
                return None
        return index if index is not None and 0 <= index < self._cache.places else None

    @property
    def __getitems__(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """As `__getitem__`, for many indices; None if the dataset has none."""
        return self._get_many if getattr(self.dataset, "__getitems__", None) else None

    def _get_many(self, indices: Sequence[Any]) -> list[Any]:
        numbers = [self._number(index) for index in indices]
        missing = [place for place, number in enumerate(numbers) if number is None or not self._cache.has(number)]
        made = dict(zip(missing, self._make_many([indices[place] for place in missing], numbers, missing), strict=True))
        return [made[place] if place in made else self[index] for place, index in enumerate(indices)]

    def _make_many(self, indices: list[Any], numbers: list[int | None], places: list[int]) -> list[Any]:
        if not indices:
            return []
        with self._cache.watching(indices, lambda: [*self.dataset.__getitems__(indices)]) as watched:
            samples = self.dataset.__getitems__(indices)
            watched.append([*samples] if isinstance(samples, list | tuple) else samples)
        if not isinstance(samples, list | tuple) or len(samples) != len(indices):
            raise OptionError(
                f"__getitems__ of {type(self.dataset).__qualname__} returned no list of a sample for each of "
                f"{len(indices)} indices, so it cannot be cached; cache a dataset that does inside of it"
            )
        for place, sample in zip(places, samples, strict=True):
            if (number := numbers[place]) is not None:
                self._cache.keep(number, sample)
        return [*samples]

    def has(self, index: int) -> bool:
        """Return whether a sample is kept."""
        number = self._number(index)
        return number is not None and self._cache.has(number)

    def cache_info(self) -> CacheInfo:
        """Return what the cache has done, in all processes: hits, misses, entries, nbytes, limit_nbytes, full."""
        return self._cache.info()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # it is not set yet
            raise AttributeError(name)
        return getattr(self.dataset, name)
