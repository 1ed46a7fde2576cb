"""Compares what a training loop and its evaluations draw from: by index where that is known, else by content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from penstock.observe.doctor.content_results import Extent, RepeatedSamples, SharedSamples
from penstock.observe.doctor.contents.content_reader import ContentReader
from penstock.observe.doctor.contents.file_twins import find_twins
from penstock.observe.doctor.contents.origins import Indices, Origin, origins_of
from penstock.observe.doctor.contents.stream_samples import StreamSamples

_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A loader of the program that evaluates."""

    name: str
    """Its name in the program, or its dataset's class."""

    loader: DataLoader[Any]
    """The loader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was found; fields of `Measurements`."""

    repeated_samples: RepeatedSamples | None = None
    """None where no sample was seen twice."""

    shared_samples: tuple[SharedSamples, ...] = ()
    """One for each evaluation that shares samples with the training."""

    listed_twice: int = 0
    """Samples that the training has several times by their index."""


def compare_loaders(training: DataLoader[Any], evaluations: Sequence[Evaluation], reader: ContentReader) -> Comparison:
    """Compare the samples of a training loader with each other, and with those of evaluations."""
    own = origins_of(training)
    if own is None:
        return Comparison()
    is_stream = isinstance(own[0].dataset, StreamSamples) if own else False
    others = [
        (one, origins)
        for one in evaluations
        if not (is_stream and one.loader.dataset is training.dataset)  # one stream is not read by two iterators
        and (origins := origins_of(one.loader)) is not None
    ]
    shared = [_by_index(one.name, own, origins, reader) for one, origins in others]
    # Other indices may still hold the same: data that has copies, and was split after they were made.
    unknown = [pair for pair, found in zip(others, shared, strict=True) if found is None or not found.samples]
    pools = [own, *(origins for _, origins in unknown)]
    reader.read_first(find_twins([origin for pool in pools for origin in pool], reader.left_s / 2))
    reader.read_in_turns(pools)
    shared += [_by_content(one.name, own, origins, reader) for one, origins in unknown]
    return Comparison(
        repeated_samples=_repeated(own, reader),
        shared_samples=tuple(found for found in shared if found is not None and found.samples),
        listed_twice=_listed_twice(own),
    )


def _listed_twice(origins: Sequence[Origin]) -> int:
    counts = (np.unique(_indices_of(dataset, origins), return_counts=True)[1] for dataset in _datasets(origins))
    return sum(int((count > 1).sum()) for count in counts)


def _by_index(
    name: str, own: Sequence[Origin], others: Sequence[Origin], reader: ContentReader
) -> SharedSamples | None:
    """Compare indices; return None where no dataset of the one is one of the other."""
    examples: list[tuple[int, int]] = []
    common, name_of_same = 0, ""
    for dataset in _datasets(others):
        theirs = np.unique(_indices_of(dataset, others))
        is_shared = np.zeros(len(theirs), bool)
        for same in (one for one in _datasets(own) if reader.is_same_data(one, dataset)):
            name_of_same = type(same).__name__
            is_shared |= np.isin(theirs, _indices_of(same, own))
        common += int(is_shared.sum())
        examples += [(index, index) for index in theirs[is_shared][:_SHOWN].tolist()]
    if not name_of_same:
        return None
    compared, trained = _count(others), _count(own)
    return SharedSamples(
        loader=name,
        dataset=name_of_same,
        samples=common,
        compared=compared,
        trained=trained,
        training_size=trained,
        extent=_extent(common, compared, trained),
        examples=tuple(examples[:_SHOWN]),
    )


def _extent(common: int, compared: int, trained: int) -> Extent:
    if common < compared:
        return "partly"
    return "same" if common >= trained else "inside"


def _by_content(name: str, own: Sequence[Origin], others: Sequence[Origin], reader: ContentReader) -> SharedSamples:
    """Compare what has been read of both."""
    mine, read = list(_read(own, reader)), list(_read(others, reader))
    trained = {digest: index for _, index, digest in mine}
    found = [
        (dataset, (trained[digest], index))
        for dataset, index, digest in read
        if digest in trained and reader.is_telling(digest)
    ]
    return SharedSamples(
        loader=name,
        dataset=found[0][0] if found else "",
        samples=len(found),
        compared=len(read),
        trained=len(mine),
        training_size=_count(own),
        extent=_extent(len(found), len(read), len(mine)),
        examples=tuple(pair for _, pair in found[:_SHOWN]),
        by_content=True,
    )


def _count(origins: Sequence[Origin]) -> int:
    """Return how many samples there are, each counted once."""
    return sum(
        dataset.size if isinstance(dataset, StreamSamples) else len(np.unique(_indices_of(dataset, origins)))
        for dataset in _datasets(origins)
    )


def _datasets(origins: Sequence[Origin]) -> list[Any]:
    return list({id(origin.dataset): origin.dataset for origin in origins}.values())


def _indices_of(dataset: Any, origins: Sequence[Origin]) -> Indices:
    return np.concatenate([one.indices for one in origins if one.dataset is dataset])


def _read(origins: Sequence[Origin], reader: ContentReader) -> Iterator[tuple[str, int, bytes]]:
    """Yield the class of the dataset, the index and the digest of each sample that was read."""
    for dataset in _datasets(origins):
        digests = sorted(reader.digests(dataset).items())
        is_used = np.isin([index for index, _ in digests], _indices_of(dataset, origins))
        name = type(dataset.stream if isinstance(dataset, StreamSamples) else dataset).__name__
        yield from ((name, index, digest) for (index, digest), used in zip(digests, is_used, strict=True) if used)


def _repeated(own: Sequence[Origin], reader: ContentReader) -> RepeatedSamples | None:
    """Return the samples that have the same content: those of the one or two datasets that have most of them.

    Two datasets that are the same but for their transforms are there on purpose.
    """
    first: dict[bytes, tuple[int, int]] = {}
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    # A stream may well have several epochs in one.
    datasets = [dataset for dataset in _datasets(own) if not isinstance(dataset, StreamSamples)]
    read = [list(_read([one for one in own if one.dataset is dataset], reader)) for dataset in datasets]
    for part, samples in enumerate(read):
        for _, index, digest in samples:
            at, before = first.setdefault(digest, (part, index))
            if (at, before) != (part, index) and reader.is_telling(digest):
                pairs.setdefault((at, part), []).append((before, index))
    pairs = {
        (at, part): found
        for (at, part), found in pairs.items()
        if at == part or not reader.is_same_data(datasets[at], datasets[part])
    }
    parts = max(pairs, key=lambda these: len(pairs[these]), default=None)
    if parts is None:
        return None
    return RepeatedSamples(
        dataset=" and ".join(type(datasets[part]).__name__ for part in sorted(set(parts))),
        checked=sum(len(read[part]) for part in set(parts)),
        repeated=len(pairs[parts]),
        examples=tuple(pairs[parts][:_SHOWN]),
        parts=parts if parts[0] != parts[1] else None,
    )
