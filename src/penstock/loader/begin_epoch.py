"""Begins a pass of a loader: from the start of an epoch, or from where a loaded state left off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from penstock.data.stream import Stream
from penstock.loader.checkpoint.dataset_fingerprint import DatasetFingerprint
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.checkpoint.resume import Resume
from penstock.loader.config import LoaderConfig
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.batch_cursor import BatchCursor
from penstock.loader.sampling.orders import drawn_from
from penstock.loader.sampling.sharding import RankSampler
from penstock.loader.sampling.stream_cursor import StreamCursor
from penstock.loader.workers.sample_seed import derive_seed
from penstock.loader.workers.stream_shard import StreamShard


def begin_epoch(config: LoaderConfig, runtime: LoaderRuntime, base_seed: int | None = None) -> EpochState:
    """Begin a pass, and make it the runtime's.

    Args:
        config: of the loader.
        runtime: of the loader; a state that was loaded into it is used up.
        base_seed: of workers that are running already (`persistent_workers`); None where new ones are started.
    """
    fingerprint_of(config, runtime)
    resume, runtime.resume, runtime.loaded = runtime.resume, None, None
    if resume is not None and resume.generator is not None and config.generator is not None:
        config.generator.set_state(resume.generator)
    generator = config.generator.get_state() if config.generator is not None else None
    number = _epoch_number(config, runtime, resume)
    # torch makes the sampler's iterator before it draws the base seed from the same generator.
    indices = iter(config.index_sampler) if config.is_iterable else _batch_cursor(config, runtime, resume)
    base_seed, epoch_seed = _seeds(config, resume, number, base_seed)
    runtime.next_epoch = number + 1
    stream_epoch = _begin_stream(config, resume)
    shards, turn = _stream_shards(config, runtime, resume, epoch_seed) if config.is_iterable else ((), 0)
    cursor = indices if isinstance(indices, BatchCursor) else StreamCursor(shards, turn, config.batch_size or 1)
    runtime.epoch = EpochState(
        number=number,
        indices=indices,
        base_seed=base_seed,
        epoch_seed=epoch_seed,
        shards=shards,
        turn=turn,
        cursor=cursor,
        rank=config.rank,
        world=config.world_size,
        stream_epoch=stream_epoch,
        order=runtime.order,
        generator=generator,
        keeps_dataset=config.num_workers == 0 or config.persistent_workers or config.worker_type == "thread",
    )
    return runtime.epoch


def fingerprint_of(config: LoaderConfig, runtime: LoaderRuntime) -> DatasetFingerprint:
    """Return the fingerprint of dataset and sampler as they were before the first pass, which may change them."""
    if runtime.fingerprint is None:
        runtime.fingerprint = DatasetFingerprint.of(config.dataset, drawn_from(config.index_sampler))
    return runtime.fingerprint


def _epoch_number(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None) -> int:
    number = runtime.next_epoch if resume is None else resume.epoch
    is_resumed_inside = resume is not None and resume.in_the_middle
    if isinstance(config.sampler, RankSampler) and not is_resumed_inside:
        return config.sampler.begin(number)
    return number


def _seeds(config: LoaderConfig, resume: Resume | None, number: int, base_seed: int | None) -> tuple[int, int]:
    """Return the seed of the workers' random states, and what the randomness of samples depends on."""
    if resume is not None and resume.in_the_middle:
        assert resume.base_seed is not None
        return resume.base_seed, resume.seed
    if base_seed is None and resume is not None and resume.start is None and config.persistent_workers:
        base_seed = resume.base_seed  # workers that persist are not seeded again
    if base_seed is None:
        # Drawn also when nothing uses it: the generator must be where torch's loader would have left it.
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=config.generator).item())
    return base_seed, derive_seed(base_seed if config.seed is None else config.seed, number)


def _batch_cursor(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None) -> BatchCursor:
    start = resume.start if resume is not None else None
    return BatchCursor(config.index_sampler, runtime.order, start=start, in_order=config.in_order)


def _begin_stream(config: LoaderConfig, resume: Resume | None) -> int | None:
    """Return the epoch of one of penstock's streams, which counts from the resumed one; None for other datasets."""
    stream = config.dataset
    if not isinstance(stream, Stream):
        return None
    if resume is not None and resume.stream_epoch is not None:
        stream.set_epoch(resume.stream_epoch)
    if config.num_workers > 0 and config.worker_type != "thread":
        stream.begin_pass()
    return stream.epoch


def _stream_shards(
    config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None, epoch_seed: int
) -> tuple[tuple[StreamShard, ...], int]:
    """Return the shards of an iterable dataset, and which of them has the first batch."""
    if resume is not None and resume.shards is not None:
        return tuple(replace(shard, epoch_seed=epoch_seed) for shard in resume.shards), resume.turn
    workers = config.num_workers
    announced = 0 if config.worker_type == "thread" else workers  # get_worker_info() is None in threads
    ends = [(end, True) for end in resume.ends] if resume is not None else _previous_ends(config, runtime)
    if len(ends) != max(1, workers):
        ends = [(None, False)] * max(1, workers)
    return tuple(
        StreamShard(
            number=number, of=announced, rank=config.rank, epoch_seed=epoch_seed, end=end, is_restored=is_restored
        )
        for number, (end, is_restored) in enumerate(ends)
    ), 0


def _previous_ends(config: LoaderConfig, runtime: LoaderRuntime) -> list[tuple[Any, bool]]:
    """Return the dataset's state at the end of the last pass in each shard, and whether another process reached it.

    (A shard that had ended already when the last pass was resumed has not been run by this process.)
    """
    previous = runtime.epoch
    if previous is None or not previous.finished or not previous.keeps_dataset or isinstance(config.dataset, Stream):
        return []
    ends = (shard["end"] for shard in previous.as_dict()["shards"])
    return [(end, begun.has_ended) for end, begun in zip(ends, previous.shards, strict=True)]
