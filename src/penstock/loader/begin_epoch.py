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
from penstock.loader.sampling.batch_cursor import BatchCursor, foreseen_start
from penstock.loader.sampling.orders import UnknownOrder, drawn_from, plain_batches, seed_drawn_from
from penstock.loader.sampling.sharding import RankSampler
from penstock.loader.sampling.stream_cursor import StreamCursor
from penstock.loader.workers.sample_fetcher import restore_end
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
    runtime.owner = None
    resume, runtime.resume, runtime.loaded = runtime.resume, None, None
    if resume is not None and resume.generator is not None and config.generator is not None:
        config.generator.set_state(resume.generator)
    ends = [(end, True) for end in resume.ends] if resume is not None else _previous_ends(config, runtime)
    before_end = _restore_before_draws(config, ends) if config.num_workers == 0 and len(ends) == 1 else None
    number = _epoch_number(config, runtime, resume)
    batch_cursor, (base_seed, epoch_seed) = _draw(config, runtime, resume, number, base_seed)
    runtime.next_epoch = number + 1
    stream_epoch = _begin_stream(config, resume)
    shards, turn = _shards(config, resume, epoch_seed, ends)
    if before_end is not None:
        shards = (replace(shards[0], before_end=before_end),)
    size = (config.batch_size or 1) if config.is_iterable else None
    runtime.epoch = EpochState(
        number=number,
        indices=iter(config.index_sampler) if batch_cursor is None else batch_cursor,
        base_seed=base_seed,
        epoch_seed=epoch_seed,
        shards=shards,
        turn=turn,
        batch_cursor=batch_cursor,
        shard_cursor=StreamCursor(shards, turn, size) if config.has_shards else None,
        rank=config.rank,
        world=config.world_size,
        stream_epoch=stream_epoch,
        order=runtime.order,
        keeps_dataset=_keeps_dataset(config),
    )
    return runtime.epoch


def foresee_pass(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, Any]:
    """Return what the next pass would draw from torch's random state if it began now, as plain values.

    A state that is taken between two passes has this, so that the loader that resumes has the pass that would have
    come. Nothing is drawn: a program must not notice that its state was asked for.
    """
    now = torch.get_rng_state()
    base_seed, first = None, now
    starts_workers = config.num_workers > 0 and not (config.persistent_workers and runtime.epoch is not None)
    is_lazy = plain_batches(config.index_sampler) is not None
    if starts_workers and not is_lazy and isinstance(runtime.order, UnknownOrder):
        return {"base_seed": None, "start": None}  # the iterator that torch drops may draw, nobody knows how much
    if config.generator is None and (starts_workers or config.num_workers == 0):
        base_seed, first = seed_drawn_from(now)
    if config.is_iterable:
        return {"base_seed": base_seed, "start": None}
    begin = first if is_lazy else now
    return {"base_seed": base_seed, "start": foreseen_start(runtime.order, begin, first).as_dict()}


def _keeps_dataset(config: LoaderConfig) -> bool:
    """Return whether the next pass reads the same dataset object, and not a new worker's copy."""
    return config.num_workers == 0 or config.persistent_workers or config.worker_type == "thread"


def _restore_before_draws(config: LoaderConfig, ends: list[tuple[Any, bool]]) -> Any:
    """Restore the end of the pass before in this process; a dataset's own state may be what seeds are drawn from.

    Returns:
        What `restore_end` returns, for an iterable dataset.
    """
    [(end, is_restored)] = ends
    if end is None or not is_restored:
        return None
    if config.is_iterable:
        return restore_end(config.dataset, end)
    if config.keeps_state:
        config.dataset.load_state_dict(end)
    return None


def fingerprint_of(config: LoaderConfig, runtime: LoaderRuntime) -> DatasetFingerprint:
    """Return the fingerprint of dataset and sampler as they were before the first pass, which may change them."""
    if runtime.fingerprint is None:
        runtime.fingerprint = DatasetFingerprint.of(config.dataset, drawn_from(config.index_sampler))
    return runtime.fingerprint


def _epoch_number(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None) -> int:
    number = runtime.next_epoch if resume is None else resume.epoch
    is_resumed_inside = resume is not None and resume.knows_order
    if isinstance(config.sampler, RankSampler) and not is_resumed_inside:
        return config.sampler.begin(number)
    return number


def _draw(
    config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None, number: int, base_seed: int | None
) -> tuple[BatchCursor | None, tuple[int, int]]:
    """Make the sampler's iterator and draw the seeds, in torch's order: both may use one generator."""
    if config.is_iterable:
        return None, _seeds(config, resume, number, base_seed)
    starts_workers = config.num_workers > 0 and base_seed is None and (resume is None or not resume.has_begun)
    if not starts_workers:
        return _batch_cursor(config, runtime, resume), _seeds(config, resume, number, base_seed)
    if isinstance(runtime.order, UnknownOrder):
        iter(config.index_sampler)  # torch drops this one, and makes another for the workers
    seeds = _seeds(config, resume, number, base_seed)
    return _batch_cursor(config, runtime, resume), seeds


def _seeds(config: LoaderConfig, resume: Resume | None, number: int, base_seed: int | None) -> tuple[int, int]:
    """Return the seed of the workers' random states, and what the randomness of samples depends on."""
    if resume is not None and resume.has_begun:
        assert resume.base_seed is not None
        return resume.base_seed, resume.seed
    if base_seed is None and resume is not None and resume.base_seed is None and config.persistent_workers:
        base_seed = resume.workers_seed  # workers that persist are not seeded again
    if base_seed is None:
        # Drawn also when nothing uses it: the generator must be where torch's loader would have left it.
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=config.generator).item())
        if resume is not None and resume.base_seed is not None:
            base_seed = resume.base_seed
    return base_seed, derive_seed(base_seed if config.seed is None else config.seed, number)


def _batch_cursor(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None) -> BatchCursor:
    return BatchCursor(
        config.index_sampler,
        runtime.order,
        start=resume.start if resume is not None else None,
        in_order=config.in_order,
        draws_ahead=config.num_workers > 0 or config.arrives_on_device,
    )


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


def _shards(
    config: LoaderConfig, resume: Resume | None, epoch_seed: int, ends: list[tuple[Any, bool]]
) -> tuple[tuple[StreamShard, ...], int]:
    """Return the shards of the dataset, if it has any, and which of them has the first batch.

    Args:
        config: of the loader.
        resume: where the pass begins.
        epoch_seed: of the pass.
        ends: see `_previous_ends`.
    """
    if not config.has_shards:
        return (), 0
    if resume is not None and resume.has_begun and (config.is_iterable or resume.shards):
        return tuple(replace(shard, epoch_seed=epoch_seed) for shard in resume.shards), resume.turn
    workers = config.num_workers
    announced = 0 if config.worker_type == "thread" else workers  # get_worker_info() is None in threads
    if len(ends) != max(1, workers):
        ends = [(None, False)] * max(1, workers)
    return tuple(
        StreamShard(
            number=number,
            of=announced,
            rank=config.rank,
            epoch_seed=epoch_seed,
            state=None if config.is_iterable else end,
            end=end if config.is_iterable else None,
            is_restored=is_restored and workers > 0,  # without workers, `_restore_before_draws` has done it
        )
        for number, (end, is_restored) in enumerate(ends)
    ), 0


def _previous_ends(config: LoaderConfig, runtime: LoaderRuntime) -> list[tuple[Any, bool]]:
    """Return the dataset's state at the end of the last pass in each shard, and whether another process reached it.

    (A shard that had ended already when the last pass was resumed has not been run by this process.)
    """
    previous = runtime.epoch
    if previous is None or previous.shard_cursor is None or isinstance(config.dataset, Stream):
        return []
    if not previous.finished or not previous.keeps_dataset:
        return []
    name = "end" if config.is_iterable else "state"
    ends = (shard[name] for shard in previous.shard_cursor.state())
    return [(end, begun.has_ended) for end, begun in zip(ends, previous.shards, strict=True)]
