"""The course of one pass: which batches it has, from where, with what randomness, and how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from penstock.distributed.place import place
from penstock.feed.cursor import BatchCursor
from penstock.feed.orders import Order, drawn_from
from penstock.feed.shares import RankSampler
from penstock.feed.sources.stream import Stream
from penstock.feed.state import VERSION, Resume, Seen, belonging
from penstock.feed.stream_cursor import StreamCursor, Used
from penstock.feed.workers.lanes import Lane
from penstock.feed.workers.sample_seed import mixed

if TYPE_CHECKING:
    from penstock.feed.loader import DataLoader


@dataclass(kw_only=True)
class Course:
    """One pass of a loader."""

    epoch: int
    indices: Iterator[Any]
    base_seed: int
    """Of the workers' random states, as torch draws it."""
    epoch_seed: int
    """What the randomness of samples depends on."""
    lanes: Sequence[Lane]
    turn: int
    """The lane whose batch comes first."""
    cursor: BatchCursor | StreamCursor
    rank: int
    world: int
    stream_epoch: int | None
    """The epoch that a stream was told."""
    order: Order
    """Of a map-style dataset's indices."""
    generator: torch.Tensor | None = None
    """The state of the loader's generator before anything was drawn from it."""
    keeps_dataset: bool = False
    """Whether the next pass is the same dataset object's, with what it remembers, and not a new worker's copy's."""
    finished: bool = False

    def used(self, receipt: Sequence[Used]) -> None:
        """Take note of what has been handed out."""
        if isinstance(self.cursor, BatchCursor):
            self.cursor.used([used.number for used in receipt])
        else:
            self.cursor.used(receipt)

    def finish(self, receipt: Sequence[Used]) -> None:
        """Take note of the end, and of what came before it and had nothing to hand out."""
        self.used(receipt)
        self.finished = True

    def look_at(self, look: Callable[[int, Lane], Lane]) -> None:
        """Have the lanes' states looked up when they are asked for: no batch is made ahead."""
        if isinstance(self.cursor, StreamCursor):
            self.cursor.look = look

    def told(self) -> dict[str, Any]:
        """Return how far it has come, in plain words."""
        where = self._indices() if isinstance(self.cursor, BatchCursor) else self._lanes()
        return {"epoch": self.epoch, "finished": self.finished, "rank": self.rank, "world": self.world, **where}

    def _indices(self) -> dict[str, Any]:
        assert isinstance(self.cursor, BatchCursor)
        told = {"indices": self.cursor.taken().as_dict()}
        if self.finished:
            return {**told, "sampler": self.order.end()}
        return told if self.cursor.has_drawn else {**told, "generator": self.generator, "sampler": self.order.end()}

    def _lanes(self) -> dict[str, Any]:
        assert isinstance(self.cursor, StreamCursor)
        lanes = self.cursor.taken()
        if not self.keeps_dataset:
            lanes = [{**told, "end": None} for told in lanes]
        return {"lanes": lanes, "turn": self.cursor.turn, "stream_epoch": self.stream_epoch}


def begin_course(loader: DataLoader[Any], base_seed: int | None = None) -> Course:
    """Begin a pass of `loader`: from its beginning, or from where a state was taken.

    Args:
        loader: whose pass.
        base_seed: of workers that are there already.
    """
    seen_of(loader)
    resume, loader._resume = loader._resume, None
    loader._loaded = None
    epoch = loader._epoch if resume is None else resume.epoch
    if resume is not None and resume.generator is not None and loader.generator is not None:
        loader.generator.set_state(resume.generator)
    generator = loader.generator.get_state() if loader.generator is not None else None
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    if resume is not None and resume.in_the_middle:
        assert resume.base_seed is not None
        base_seed, epoch_seed = resume.base_seed, resume.seed
        indices = iter(loader._index_sampler) if is_iterable else _cursor(loader, resume)
    else:
        if isinstance(loader.sampler, RankSampler):
            epoch = loader.sampler.begin(epoch)
        indices = iter(loader._index_sampler) if is_iterable else _cursor(loader, None)
        if base_seed is None and resume is not None and resume.begun is None and loader.persistent_workers:
            base_seed = resume.base_seed  # workers that live on are not seeded anew
        if base_seed is None:
            # Drawn also when nothing uses it: the generator must be where torch's loader would have left it.
            base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        epoch_seed = mixed(base_seed if loader.seed is None else loader.seed, epoch)
    loader._epoch = epoch + 1
    stream_epoch = _begin_stream(loader, resume)
    lanes, turn = _lanes(loader, resume, epoch_seed) if is_iterable else ((), 0)
    cursor = indices if isinstance(indices, BatchCursor) else StreamCursor(lanes, turn, loader.batch_size or 1)
    return Course(
        epoch=epoch,
        indices=indices,
        base_seed=base_seed,
        epoch_seed=epoch_seed,
        lanes=lanes,
        turn=turn,
        cursor=cursor,
        rank=loader.rank,
        world=loader.world_size,
        stream_epoch=stream_epoch,
        order=loader._order,
        generator=generator,
        keeps_dataset=loader.num_workers == 0 or loader.persistent_workers or loader._body == "thread",
    )


def seen_of(loader: DataLoader[Any]) -> Seen:
    """Return what the loader's dataset and sampler consisted of before its first pass, which may change them."""
    if loader._seen is None:
        loader._seen = Seen.of(loader.dataset, drawn_from(loader._index_sampler))
    return loader._seen


def state_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state of a loader; see `state`."""
    course = loader._course
    before = {"epoch": loader._epoch, "finished": False, "rank": loader.rank, "world": loader.world_size}
    return {
        "version": VERSION,
        "of": belonging(loader.dataset, drawn_from(loader._index_sampler), loader._kept_order),
        "contents": {"rank": place()[0], **asdict(seen_of(loader))},
        "seed": course.epoch_seed if course is not None else 0,
        "base_seed": course.base_seed if course is not None else 0,
        "generator": loader.generator.get_state() if loader.generator is not None else None,
        **(course.told() if course is not None else before),
    }


def _cursor(loader: DataLoader[Any], resume: Resume | None) -> BatchCursor:
    begun = resume.begun if resume is not None else None
    return BatchCursor(loader._index_sampler, loader._order, begun=begun, in_order=loader.in_order)


def _lanes(loader: DataLoader[Any], resume: Resume | None, epoch_seed: int) -> tuple[tuple[Lane, ...], int]:
    if resume is not None and resume.lanes is not None:
        return tuple(replace(lane, epoch_seed=epoch_seed) for lane in resume.lanes), resume.turn
    workers, rank = loader.num_workers, loader.rank
    told = 0 if loader._body == "thread" else workers  # threads are told of no workers
    ends = [(end, True) for end in resume.ends] if resume is not None else _last_ends(loader)
    if len(ends) != max(1, workers):
        ends = [(None, False)] * max(1, workers)
    return tuple(
        Lane(number=number, of=told, rank=rank, epoch_seed=epoch_seed, end=end, is_restored=is_restored)
        for number, (end, is_restored) in enumerate(ends)
    ), 0


def _last_ends(loader: DataLoader[Any]) -> list[tuple[Any, bool]]:
    """Return what the dataset said of itself in each lane at the end of the last pass; and whether not in this process.

    (A lane that had ended when the last pass was resumed has not been run here.)
    """
    last = loader._course
    if last is None or not last.finished or not last.keeps_dataset or isinstance(loader.dataset, Stream):
        return []
    ends = (told["end"] for told in last.told()["lanes"])
    return [(end, begun.has_ended) for end, begun in zip(ends, last.lanes, strict=True)]


def _begin_stream(loader: DataLoader[Any], resume: Resume | None) -> int | None:
    """Return the epoch that a stream is at, which counts on where it goes on; None for other datasets."""
    stream = loader.dataset
    if not isinstance(stream, Stream):
        return None
    if resume is not None and resume.stream_epoch is not None:
        stream.set_epoch(resume.stream_epoch)
    if loader.num_workers > 0 and loader._body != "thread":
        stream.begin_pass()
    return stream.epoch
