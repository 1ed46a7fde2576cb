"""Begins a pass of a loader: from the start of an epoch, or from where a loaded state left off."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from penstock.core.errors import OptionError
from penstock.data.source import Source
from penstock.data.stream import Stream
from penstock.loader.checkpoint.dataset_fingerprint import fingerprint
from penstock.loader.checkpoint.epoch_state import EpochState
from penstock.loader.checkpoint.resume import Resume
from penstock.loader.config import LoaderConfig
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.batch_cursor import BatchCursor, is_over
from penstock.loader.sampling.index_digest import UNKNOWN, DigestLog, PassDigest
from penstock.loader.sampling.orders import drawn_from, order_for
from penstock.loader.sampling.own_sampler import RankSampler
from penstock.loader.sampling.stream_cursor import StreamCursor
from penstock.loader.sampling.unknown_order import UnknownOrder
from penstock.loader.workers.sample_seed import derive_seed
from penstock.loader.workers.stream_shard import StreamShard
from penstock.loader.workers.worker_spec import is_stateful


def begin_epoch(config: LoaderConfig, runtime: LoaderRuntime, base_seed: int | None = None) -> EpochState:
    """Begin a pass, and make it the runtime's.

    Args:
        config: of the loader.
        runtime: of the loader; a state that was loaded into it is used up.
        base_seed: of workers that are running already (`persistent_workers`); None where new ones are started.
    """
    _follow_sampler(config, runtime)
    fingerprint_of(config, runtime)
    runtime.owner = None
    if config.is_simple and runtime.resume is None and not is_stateful(config.dataset):
        return _begin_simple(config, runtime)
    is_asked = runtime.is_epoch_set or epoch_of_dataset(config) is not None
    resume, runtime.resume, runtime.loaded = _following_set_epoch(config, runtime), None, None
    if resume is not None and resume.generator is not None and config.generator is not None:
        config.generator.set_state(resume.generator)
    ends = [(end, True) for end in resume.ends] if resume is not None else _previous_ends(config, runtime)
    if config.keeps_state and config.num_workers == 0 and resume is not None:
        for end in resume.ends:  # first: it may be what seeds are drawn from
            config.dataset.load_state_dict(end)
        ends = [(end, False) for end in resume.ends]
    if resume is None:
        _repeat_if_left(config, runtime)
    number = _epoch_number(config, runtime, resume)
    digest = _begin_digest(config, runtime, resume, number)
    batch_cursor, (base_seed, epoch_seed) = _draw(config, runtime, resume, number, base_seed, digest)
    runtime.next_epoch, runtime.is_epoch_set = number + 1, False
    stream_epoch = _begin_dataset(config, number, runtime.epoch)
    shards, turn = _shards(config, resume, epoch_seed, ends)
    if stream_epoch is not None:
        shards = tuple(replace(shard, stream_epoch=stream_epoch) for shard in shards)
    size = (config.batch_size or 1) if config.is_iterable else None
    runtime.epoch = EpochState(
        number=number,
        indices=_stream_requests(config.index_sampler) if batch_cursor is None else batch_cursor,
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
        digest=digest,
        keeps_dataset=_keeps_dataset(config),
        is_whole=resume is None or not resume.has_begun,
        leads_on=resume is not None and not is_asked and _ends_everywhere(config, runtime, resume),
        wants_states=config.is_evened,
    )
    return runtime.epoch


def _follow_sampler(config: LoaderConfig, runtime: LoaderRuntime) -> None:
    """Take the sampler that the program has put into the batch sampler since the last pass, as torch's loader does."""
    drawn = drawn_from(config.index_sampler)
    if drawn is not runtime.drawn:
        runtime.order = order_for(config.index_sampler, snapshot_every=config.snapshot_every_n_steps or 1)
        runtime.drawn = drawn


def _begin_simple(config: LoaderConfig, runtime: LoaderRuntime) -> EpochState:
    """Begin a whole pass of a `LoaderConfig.is_simple`: what a short pass takes is mostly its beginning."""
    number = runtime.next_epoch
    runtime.next_epoch, runtime.is_epoch_set, runtime.loaded = number + 1, False, None
    digest, sampler, cursor = _begin_digest(config, runtime, None, number), config.index_sampler, None
    if not config.is_iterable:
        cursor = BatchCursor(sampler, runtime.order, draws_ahead=config.arrives_on_device, digest=digest)
    base_seed, epoch_seed = _seeds(config, None, number, None)
    shards: tuple[StreamShard, ...] = ()
    if config.is_iterable:
        shards = (StreamShard(number=0, of=0, rank=config.rank, epoch_seed=epoch_seed, is_restored=False),)
    runtime.epoch = EpochState(
        number=number,
        indices=_stream_requests(sampler) if cursor is None else cursor,
        base_seed=base_seed,
        epoch_seed=epoch_seed,
        batch_cursor=cursor,
        shards=shards,
        shard_cursor=StreamCursor(shards, 0, config.batch_size or 1) if shards else None,
        rank=config.rank,
        world=config.world_size,
        order=runtime.order,
        digest=digest,
        keeps_dataset=True,
    )
    return runtime.epoch


def _following_set_epoch(config: LoaderConfig, runtime: LoaderRuntime) -> Resume | None:
    """Return where the pass resumes: at a state's place or, with nothing of its pass left, in the epoch that is set.

    Hugging Face's Trainer sets the next one after a checkpoint that was saved after an epoch's last batch.
    """
    resume, wanted = runtime.resume, epoch_of_dataset(config)
    if wanted is None and runtime.is_epoch_set:
        wanted = runtime.next_epoch
    if resume is None or wanted is None or wanted == resume.epoch:
        return resume
    if not resume.has_begun:
        return replace(resume, epoch=wanted)
    if _is_over(config, runtime, resume):
        return None
    warnings.warn(
        f"the state that was loaded is in the middle of epoch {resume.epoch}, which this pass continues, although "
        f"set_epoch({wanted}) was called since; call it with {resume.epoch} first, or load no state to begin epoch "
        f"{wanted}",
        stacklevel=5,
    )
    return resume


def next_pass(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, Any]:
    """Return what the next pass would be drawn from if it began now, as plain values."""
    return {"is_seeded": config.persistent_workers and runtime.epoch is not None, "random": torch.get_rng_state()}


def _keeps_dataset(config: LoaderConfig) -> bool:
    """Return whether the next pass reads the same dataset object, and not a new worker's copy."""
    return config.num_workers == 0 or config.persistent_workers or config.worker_type == "thread"


def fingerprint_of(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, str]:
    """Return the fingerprint of dataset and sampler as they were before the first pass, which may change them."""
    if runtime.fingerprint is None:
        runtime.fingerprint = fingerprint(config.dataset, drawn_from(config.index_sampler))
    return runtime.fingerprint


def _has_others(config: LoaderConfig) -> bool:
    """Return whether other ranks must be in the same epoch: those that share the samples out, and replicas' others."""
    return config.world_size > 1 or config.has_replicas


def _repeat_if_left(config: LoaderConfig, runtime: LoaderRuntime) -> None:
    """Have the epoch of the last pass come again if that was left before its end, and ranks share the samples out.

    They must be in the same epoch, and one rank may have looked at a batch alone.
    """
    left = runtime.epoch
    if left is None or left.finished or not _has_others(config) or not (config.is_distributed or config.is_own_stream):
        return
    if epoch_set(config, runtime) is not None:
        return
    runtime.next_epoch = left.number
    if left.handed_out > 1:
        warnings.warn(
            f"epoch {left.number} was left after {left.handed_out} batches, and begins again in the same order, as "
            "with torch's DistributedSampler: without this, a rank that began a pass alone would be an epoch ahead of "
            "the others. Call loader.set_epoch(epoch) before each pass to go on to another epoch",
            stacklevel=6,
        )


def _epoch_number(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None) -> int:
    if resume is None:
        of_dataset = epoch_of_dataset(config)
        number = runtime.next_epoch if of_dataset is None else of_dataset
    else:
        number = resume.epoch
    if isinstance(config.sampler, RankSampler) and (resume is None or not resume.knows_order):
        return config.sampler.begin(number)
    return number


def epoch_set(config: LoaderConfig, runtime: LoaderRuntime) -> int | None:
    """Return the epoch that the program has set, on the loader, its sampler or its dataset, since the last pass began.

    None if it has set none.
    """
    if runtime.is_epoch_set:
        return runtime.next_epoch
    of_sampler = config.sampler.epoch_set if isinstance(config.sampler, RankSampler) else None
    return epoch_of_dataset(config) if of_sampler is None else of_sampler


def take_epoch(config: LoaderConfig, runtime: LoaderRuntime, number: int) -> None:
    """Forget that this epoch was set: it has begun."""
    runtime.next_epoch, runtime.is_epoch_set = number + 1, False
    if isinstance(config.sampler, RankSampler):
        config.sampler.begin(number)
    if epoch_of_dataset(config) is not None:
        config.dataset.begin_epoch(number)


def epoch_of_dataset(config: LoaderConfig) -> int | None:
    """Return the epoch to which the program has set the loader's mixture or stream since the last pass, if it has."""
    has_epochs = config.counts_epochs and isinstance(config.dataset, Source | Stream)
    return config.dataset.epoch if has_epochs and config.dataset.is_epoch_set else None


def _is_over(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume) -> bool:
    """Return whether nothing is left of the pass that a state was taken in, as far as that is known."""
    if config.is_iterable:
        return bool(resume.shards) and all(shard.has_ended for shard in resume.shards)
    return resume.start is not None and is_over(config.index_sampler, runtime.order, resume.start)


def _ends_everywhere(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume) -> bool:
    """Return whether all ranks have nothing left of a pass if this one has nothing."""
    if config.is_iterable:
        return config.world_size == 1 or config.is_evened
    share = runtime.order.share
    if share.world == 1 or share.uneven != "join" or resume.start is None:
        return True
    return not resume.start.leftover and resume.start.position >= len(config.dataset)


def _begin_digest(config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None, number: int) -> PassDigest:
    """Begin the digest of what the pass hands out; after a resume, where that of the same rank had been."""
    counters = runtime.counters
    if counters.digests is None:
        counters.digests = DigestLog()
    begun: Sequence[int] = ()
    if resume is not None and resume.has_begun:
        begun = resume.digest or [resume.start.position if resume.start is not None else 0]
    digest = counters.digests.begin(number, *begun)
    counters.share = _share(config, runtime)
    if config.is_iterable:
        digest.reason = "a stream has no indices"
    elif resume is not None and resume.has_begun and resume.digest is None and isinstance(runtime.order, UnknownOrder):
        digest.reason = UNKNOWN
    return digest


def _share(config: LoaderConfig, runtime: LoaderRuntime) -> tuple[int, int] | None:
    """Return which share of the samples this rank is handed, of how many; None where that is not known."""
    if config.is_iterable:
        return (config.rank, config.world_size) if config.is_own_stream else None
    if isinstance(runtime.order, UnknownOrder):
        return None
    return runtime.order.share.rank, runtime.order.share.world


def _draw(
    config: LoaderConfig,
    runtime: LoaderRuntime,
    resume: Resume | None,
    number: int,
    base_seed: int | None,
    digest: PassDigest,
) -> tuple[BatchCursor | None, tuple[int, int]]:
    """Return the batches of indices and the seeds.

    After a state before the first index they are drawn from torch's random state of then. The program's own stays as it
    is, unless that is the same.
    """
    random = resume.random.cpu() if resume is not None and resume.random is not None else None
    if random is None or torch.equal(random, torch.get_rng_state()):
        return _draw_now(config, runtime, resume, number, base_seed, digest)
    with torch.random.fork_rng(devices=()):
        torch.set_rng_state(random)
        cursor, seeds = _draw_now(config, runtime, resume, number, base_seed, digest)
        if cursor is not None:
            cursor.draw_first()
    return cursor, seeds


def _draw_now(
    config: LoaderConfig,
    runtime: LoaderRuntime,
    resume: Resume | None,
    number: int,
    base_seed: int | None,
    digest: PassDigest,
) -> tuple[BatchCursor | None, tuple[int, int]]:
    """Make the sampler's iterator and draw the seeds, in torch's order: both may use one generator."""
    if config.is_iterable:
        return None, _seeds(config, resume, number, base_seed)
    is_continued = resume is not None and (resume.has_begun or _has_seeded_workers(config, resume))
    starts_workers = config.num_workers > 0 and base_seed is None and not is_continued
    if not starts_workers:
        return _batch_cursor(config, runtime, resume, digest), _seeds(config, resume, number, base_seed)
    if isinstance(runtime.order, UnknownOrder):
        iter(config.index_sampler)  # torch drops this one, and makes another for the workers
    seeds = _seeds(config, resume, number, base_seed)
    return _batch_cursor(config, runtime, resume, digest), seeds


def _seeds(config: LoaderConfig, resume: Resume | None, number: int, base_seed: int | None) -> tuple[int, int]:
    """Return the seed of the workers' random states, and what the randomness of samples depends on."""
    if resume is not None and resume.has_begun:
        assert resume.base_seed is not None
        return resume.base_seed, resume.seed
    if base_seed is None and resume is not None and _has_seeded_workers(config, resume):
        base_seed = resume.workers_seed
    if base_seed is None:
        # Drawn also when nothing uses it: the generator must be where torch's loader would have left it.
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=config.generator).item())
    return base_seed, derive_seed(base_seed if config.seed is None else config.seed, number)


def _has_seeded_workers(config: LoaderConfig, resume: Resume) -> bool:
    """Return whether these workers take the place of some that persist, and are not seeded again."""
    return config.persistent_workers and resume.workers_seed is not None


def _batch_cursor(
    config: LoaderConfig, runtime: LoaderRuntime, resume: Resume | None, digest: PassDigest
) -> BatchCursor:
    share = runtime.order.share
    # Batches of which nothing is left are passed over, on one rank and not on another.
    may_differ = config.errors != "raise" and share.world > 1 and share.uneven == "join"
    return BatchCursor(
        config.index_sampler,
        runtime.order,
        start=resume.start if resume is not None else None,
        in_order=config.keeps_order and not may_differ,
        draws_ahead=config.num_workers > 0 or config.arrives_on_device,
        digest=digest,
    )


def _begin_dataset(config: LoaderConfig, number: int, previous: EpochState | None) -> int | None:
    """Return the epoch of one of penstock's streams or mixtures, which is the loader's; None for other datasets.

    A loader in the place of torch's leaves both in theirs, as torch's does: only workers that persist count the passes
    over a stream, and these do not see `set_epoch`.
    """
    dataset = config.dataset
    if isinstance(dataset, Source):
        if config.counts_epochs and dataset.epoch is not None:
            dataset.set_epoch(number)
        epoch = dataset.begin_epoch(number) if config.counts_epochs else dataset.epoch
        if epoch is not None and config.worker_type == "ray" and config.persistent_workers:
            raise OptionError(
                "a mixture has other samples in each epoch, and Ray workers that persist are on machines where they do "
                "not see which it is; use persistent_workers=False"
            )
        return epoch
    if not isinstance(dataset, Stream):
        return None
    dataset.share_out((config.rank, config.world_size) if config.is_in_group else None)
    if config.counts_epochs:
        return dataset.begin_epoch(number)
    is_counted = config.persistent_workers and not config.is_threaded and previous is not None
    return previous.stream_epoch + 1 if is_counted else dataset.epoch  # type: ignore[union-attr,operator]


def _stream_requests(sampler: Any) -> Iterator[Any]:
    """Return what torch's sampler of a stream's batches yields, of which only the length means something."""
    if type(sampler) is BatchSampler and type(sampler.sampler) is _InfiniteConstantSampler:
        return itertools.repeat([None] * sampler.batch_size)
    return iter(sampler)


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
            is_restored=is_restored,
        )
        for number, (end, is_restored) in enumerate(ends)
    ), 0


def _previous_ends(config: LoaderConfig, runtime: LoaderRuntime) -> list[tuple[Any, bool]]:
    """Return the dataset's state at the end of the last pass in each shard, and whether another process reached it.

    (A shard that had ended already when the last pass was resumed has not been run by this process.)
    """
    previous = runtime.epoch
    if previous is None or previous.shard_cursor is None or config.is_own_stream:
        return []
    if not previous.finished or not previous.keeps_dataset:
        return []
    name = "end" if config.is_iterable else "state"
    ends = (shard[name] for shard in previous.shard_cursor.state())
    return [(end, begun.has_ended) for end, begun in zip(ends, previous.shards, strict=True)]
