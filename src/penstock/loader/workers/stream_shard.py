"""The shards of an iterable dataset: as many as the `num_workers` that its `get_worker_info()` returns.

An iterable dataset divides its samples by `get_worker_info()`. So a shard is the dataset seen as worker `number` of
`of`. Usually each worker process has one shard. A loop that resumes with another number of workers has the shards of
the interrupted one, each from where it was; a process then interleaves several of them, each with its own copy of the
dataset and its own random states.

A map-style dataset has no shards, unless it keeps a state (`state_dict` and `load_state_dict`, as torchdata asks for
them): then each worker has one, whose state is the dataset's after the worker's last batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import _utils

from penstock.core.errors import StateError
from penstock.core.random_states import get_states, set_states
from penstock.loader.workers.fetcher import BatchFetcher
from penstock.loader.workers.worker_spec import WorkerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShard:
    """One shard of an iterable dataset, and where it begins."""

    number: int
    of: int
    """`num_workers` of its `get_worker_info()`; 0 where that is None."""
    rank: int = 0
    """The rank that had begun it."""
    epoch_seed: int | None = None
    """What the randomness of its samples depends on."""
    stream_epoch: int | None = None
    """The epoch of one of penstock's streams, which a worker that persists would count by itself."""
    has_ended: bool = False
    state: Any = None
    """What `SampleFetcher.stream_state` has returned."""
    since: tuple[tuple[int, int], ...] = ()
    """Batches made since then, as (how many, of how many samples); they are made again, and dropped."""
    end: Any = None
    """The dataset's state at the end of a pass; of a shard that has not ended, at the end of the pass before."""
    is_restored: bool = True
    """Whether it begins in a process that has not reached that end (for a map-style dataset: that state) itself."""

    def after(self, size: int | None, state: Any = None, *, batches: int = 1) -> StreamShard:
        """Return the shard after more batches of `size`, and with the state that was taken then, if one was.

        Of a map-style dataset no batch can be made again from its size, which is None here.

        >>> StreamShard(number=0, of=2).after(8).after(8).after(4).since
        ((2, 8), (1, 4))
        """
        if state is not None:
            return replace(self, state=state, since=())
        if size is None or not batches:
            return self
        if self.since and self.since[-1][1] == size:
            return replace(self, since=(*self.since[:-1], (self.since[-1][0] + batches, size)))
        return replace(self, since=(*self.since, (batches, size)))

    def at_end(self, end: Any) -> StreamShard:
        """Return the shard when it has ended, with its dataset's state then; `replace` takes as long as a batch."""
        return StreamShard(
            number=self.number,
            of=self.of,
            rank=self.rank,
            epoch_seed=self.epoch_seed,
            stream_epoch=self.stream_epoch,
            has_ended=True,
            end=end,
            is_restored=self.is_restored,
        )


def shards_of_worker(shards: Sequence[StreamShard], worker: int, workers: int) -> dict[int, StreamShard]:
    """Return the shards that one of `workers` workers runs, by their positions in the round.

    >>> shards = [StreamShard(number=number, of=3) for number in range(3)]
    >>> {position: shard.number for position, shard in shards_of_worker(shards, 0, 2).items()}
    {0: 0, 2: 2}
    """
    return {position: shard for position, shard in enumerate(shards) if position % workers == worker}


def install_info(shard: StreamShard, worker_spec: WorkerSpec, base_seed: int) -> None:
    """Have `get_worker_info()` return what it does in the worker that begins this shard; None if there is none."""
    info: Any = None
    if shard.of:
        seed = base_seed + shard.number
        info = _utils.worker.WorkerInfo(id=shard.number, num_workers=shard.of, seed=seed, dataset=worker_spec.dataset)
    _utils.worker._worker_info = info


InstallInfo = Callable[[StreamShard, WorkerSpec], None]
"""Called before a shard's dataset is asked for samples: has `get_worker_info()` return that shard's worker."""

Seed = Callable[[StreamShard], None]
"""Called before a shard begins: seeds the random states as for a worker that has no other shard."""


class StreamShards:
    """The fetchers of one worker: one for each of its shards, or one for a map-style dataset.

    Args:
        worker_spec: what all of them do.
        shards: those of this worker, by their positions in the round; none for map-style datasets.
        install_info: see `InstallInfo`.
        seed: see `Seed`; None where random states are the training loop's, and must stay as they are.
        own: the shard for which this process was set up.
    """

    def __init__(
        self,
        worker_spec: WorkerSpec,
        shards: Mapping[int, StreamShard],
        install_info: InstallInfo,
        *,
        seed: Seed | None = None,
        own: StreamShard | None = None,
    ) -> None:
        self._worker_spec = worker_spec
        self.install_info = install_info
        self._seed = seed
        self._own = own
        self._shards: Mapping[int, StreamShard] = {}
        self._has_numbers = False
        """Whether `get_worker_info()` returns something for some of them."""
        self._fetchers: dict[int, BatchFetcher] = {}
        self._states: dict[int, Any] = {}
        self._current = -1
        self.begin(shards)

    def begin(self, shards: Mapping[int, StreamShard]) -> None:
        """Begin an epoch."""
        if not self._worker_spec.iterable:
            self._begin_map_style(shards)
            return
        shards = {position: shard for position, shard in shards.items() if not shard.has_ended}
        self._shards = shards
        self._has_numbers = any(shard.of for shard in shards.values())
        is_same = len(self._fetchers) == len(shards) == 1
        specs = {} if is_same else self._copies(shards)
        earlier, self._fetchers, self._states, self._current = self._fetchers, {}, {}, -1
        for position, shard in shards.items():
            worker_spec = self._worker_spec if is_same else specs[position]
            self._activate(position, shard, worker_spec)
            if worker_spec.init_fn is not None and shard.of and not self._is_own(shard):
                worker_spec.init_fn(shard.number)
            fetcher = next(iter(earlier.values())) if is_same else self._make_fetcher(worker_spec)
            # A process that has reached that end remembers it: the training process, and a persistent worker.
            remembers_end = not shard.is_restored and (self._own is None or is_same)
            end = None if remembers_end else shard.end
            if shard.stream_epoch is not None:
                worker_spec.dataset.set_epoch(shard.stream_epoch)
            fetcher.samples.restart(f"{shard.rank}.{shard.number}", shard.state, end)
            for batches, size in shard.since:
                for _ in range(batches):
                    fetcher.pass_over(size, shard.epoch_seed)
            self._fetchers[position] = fetcher

    def _begin_map_style(self, shards: Mapping[int, StreamShard]) -> None:
        is_new = not self._fetchers
        if is_new:
            self._fetchers[0] = self._make_fetcher(self._worker_spec)
        for shard in shards.values():  # one, if the dataset keeps a state
            # The training process, and a persistent worker, have reached that state themselves.
            is_reached = not shard.is_restored and (self._own is None or not is_new)
            if shard.state is not None and not is_reached:
                self._worker_spec.dataset.load_state_dict(shard.state)

    def fetcher(self, position: int) -> BatchFetcher | None:
        """Return the fetcher of a shard (any for map-style datasets), and activate it; None if it has not begun."""
        if not self._worker_spec.iterable:
            return self._fetchers.get(0)
        fetcher = self._fetchers.get(position)
        if fetcher is not None and position != self._current:
            self._activate(position, self._shards[position], fetcher.worker_spec)
        return fetcher

    def deactivate(self) -> None:
        """Deactivate the shard: `get_worker_info()` returns what it does outside of the loader."""
        if self._has_numbers:
            self.install_info(StreamShard(number=0, of=0), self._worker_spec)
            self._current = -1

    def _is_own(self, shard: StreamShard) -> bool:
        return self._own is not None and (shard.number, shard.of) == (self._own.number, self._own.of)

    def _make_fetcher(self, worker_spec: WorkerSpec) -> BatchFetcher:
        return BatchFetcher(worker_spec, in_training_process=self._seed is None)

    def _copies(self, shards: Mapping[int, StreamShard]) -> dict[int, WorkerSpec]:
        """Return a spec for each shard: the first has the dataset, the others have copies of it."""
        specs = dict.fromkeys(shards, self._worker_spec)
        for position in [*shards][1:]:
            try:
                specs[position] = replace(self._worker_spec, dataset=copy.deepcopy(self._worker_spec.dataset))
            except Exception as error:
                raise StateError(
                    f"this state has {len(shards)} streams for one worker, and the dataset cannot be copied for each "
                    f"({type(error).__name__}: {error}); resume with the number of workers that it was saved with"
                ) from error
        return specs

    def _activate(self, position: int, shard: StreamShard, worker_spec: WorkerSpec) -> None:
        """Activate `shard`: with the random states that it left, if the worker has others."""
        self.install_info(shard, worker_spec)
        if self._seed is not None and (len(self._shards) > 1 or not self._is_own(shard)):
            if self._current >= 0:
                self._states[self._current] = get_states()
            if position in self._states:
                set_states(self._states[position])
            else:
                self._seed(shard)
        self._current = position
