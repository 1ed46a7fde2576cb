"""Where a pass begins that resumes from saved states: of one rank or of all, with any number of workers and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.core.errors import StateError
from penstock.data.stream import Stream
from penstock.loader.sampling.batch_cursor import CursorState, PassStart, pass_start_after
from penstock.loader.sampling.orders import Order
from penstock.loader.sampling.stream_cursor import shard_from
from penstock.loader.workers.stream_shard import StreamShard

SavedState = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Where a loader's next pass begins."""

    epoch: int
    has_begun: bool = False
    """Whether the pass was begun before the state was taken."""
    generator: torch.Tensor | None = None
    start: PassStart | None = None
    """Of a map-style dataset's pass that was begun."""
    shards: tuple[StreamShard, ...] = ()
    """Of a pass that was begun, where there are shards; see `StreamShard`."""
    turn: int = 0
    """The shard whose batch comes first."""
    seed: int = 0
    base_seed: int | None = None
    """Of the workers' random states, of a pass that was begun."""
    random: torch.Tensor | None = None
    """Torch's random state, from which the pass is drawn; None where it was drawn before the state was taken."""
    workers_seed: int | None = None
    """That of the pass before, where its workers persist."""
    sampler: dict[str, Any] | None = None
    """The sampler's state before the epoch."""
    digest: Sequence[int] | None = None
    """Of what this rank had been handed of the pass; None where another rank's state, or another number of ranks', is
    resumed."""
    ends: tuple[Any, ...] = ()
    """Of a pass that was not begun: the state of the dataset, for each shard, at the end of the one before."""

    @property
    def knows_order(self) -> bool:
        """Whether it is known how the epoch's order was drawn."""
        return self.start is not None and self.start.order_state is not None


def resume_from(
    states: Sequence[SavedState], *, order: Order | None, world: int, rank: int, stream: Any, workers: int
) -> Resume:
    """Return where the next pass begins, after states that `check_states` has accepted.

    Args:
        states: of one rank, or of all.
        order: of the loader that resumes, for a map-style dataset.
        world: how many ranks there are now.
        rank: which of them this is.
        stream: the loader's dataset if it is one of penstock's streams, else None.
        workers: how many workers the loader has.

    Raises:
        StateError: the states of more ranks are needed, or the work cannot be shared out over so many ranks.
    """
    one = states[0]
    if any(state["epoch"] != one["epoch"] for state in states):
        raise StateError("these states were not taken in the same epoch; load those that were saved together")
    own = next((state for state in states if state.get("rank") == rank), one)
    if "next" in one and all("next" in state for state in states):
        return _not_begun(one, own, order=order, world=world, rank=rank, stream=stream, workers=workers)
    begun: dict[str, Any] = {
        "epoch": one["epoch"],
        "has_begun": True,
        **{name: own[name] for name in ("seed", "base_seed", "generator")},
    }
    share, saved = (rank, world) if order is None else (order.share.rank, order.share.world), own.get("indices", own)
    if (saved["rank"], saved["world"]) == share:
        begun["digest"] = own.get("digest")
    if order is None:
        shards = _shards_of_rank(states, world, rank, stream, max(1, workers))
        is_as_it_was = (own["rank"], own["world"]) == (rank, world) and len(shards) == len(own["shards"])
        turn = own["turn"] if is_as_it_was else 0
        return Resume(**begun, shards=shards, turn=turn)
    start = pass_start_after([CursorState.of(state["indices"]) for state in states], order)
    if _own_datasets(own, world=world, rank=rank, workers=workers):
        begun |= {"shards": tuple(shard_from(shard) for shard in own["shards"]), "turn": own["turn"]}
    return Resume(**begun, start=start, random=start.random, sampler=own.get("sampler"))


def _not_begun(
    one: SavedState, own: SavedState, *, order: Order | None, world: int, rank: int, stream: Any, workers: int
) -> Resume:
    """Return the beginning of the pass after one that had ended, or of the first."""
    if order is not None:
        ends = _own_datasets(own, world=world, rank=rank, workers=workers)
    else:
        is_own = (own["rank"], own["world"]) == (rank, world) and stream is None
        ends = tuple(shard["end"] for shard in own.get("shards", ())) if is_own else ()
    return Resume(
        epoch=one["epoch"] + one["finished"],
        generator=one["generator"],
        random=own["next"]["random"],
        sampler=own.get("sampler"),
        ends=ends,
        workers_seed=own["base_seed"] if own["next"]["is_seeded"] else None,
    )


def _own_datasets(own: SavedState, *, world: int, rank: int, workers: int) -> tuple[Any, ...]:
    """Return the state of a map-style dataset in each worker of this rank; empty if none keeps one.

    Raises:
        StateError: there are other ranks or workers than there were.
    """
    states = tuple(shard["state"] for shard in own.get("shards", ()))
    if all(state is None for state in states):
        return ()
    if (own["rank"], own["world"]) != (rank, world):
        raise StateError(
            f"the dataset keeps a state of its own on each of the {own['world']} ranks, and rank {rank} of {world} has "
            "none here; load the state that this rank has saved, with as many ranks"
        )
    if len(states) != max(1, workers):
        raise StateError(
            f"the dataset keeps a state of its own in each of {len(states)} workers (or this process), and this loader "
            f"has num_workers={workers}; resume with as many, or take the state after an epoch without persistent "
            "workers, when the dataset begins anew"
        )
    return states


def _shards_of_rank(
    states: Sequence[SavedState], world: int, rank: int, stream: Any, workers: int
) -> tuple[StreamShard, ...]:
    """Return the shards that this rank resumes: its own, or its part of everybody's where there are other ranks."""
    saved_world = int(states[0]["world"])
    own = next((state for state in states if (state["rank"], state["world"]) == (rank, world)), None)
    if own is not None:
        shards = [_with_initial_state(shard_from(shard), own, stream) for shard in own["shards"]]
        return _split(shards, workers, stream)
    if len(states) == 1 and saved_world == world:
        raise StateError(f"this is the state of rank {states[0]['rank']}, and this is rank {rank}; load its own")
    if sorted(state["rank"] for state in states) != list(range(saved_world)):
        raise StateError(
            f"{saved_world} ranks had shares of this stream, and now there are {world}; load the states of all of "
            "them: loader.load_state_dict([state of rank 0, state of rank 1, ...])"
        )
    if not isinstance(stream, Stream) and saved_world != world:
        raise StateError(
            f"this state is of {saved_world} ranks, and here are {world}: the dataset shares out its samples among "
            "ranks by itself, so only as many can resume; penstock.open(...).stream() can be shared out again"
        )
    left = [(state, shard) for state in states for shard in state["shards"] if not shard["ended"]]
    shards = [_with_initial_state(shard_from(shard), state, stream) for state, shard in left]
    return _split(shards, workers * world, stream)[rank::world]


def _split(shards: list[StreamShard], consumers: int, stream: Any) -> tuple[StreamShard, ...]:
    """Return at least as many shards as there are consumers, where the dataset can split what is left of one.

    Shards that have ended count: with as many consumers as before, the batches left are those of the interrupted pass.
    """
    if not isinstance(stream, Stream) or len(shards) >= consumers:
        return tuple(shards)
    left = [shard for shard in shards if not shard.has_ended]
    if any(shard.since for shard in left):
        return tuple(shards)
    ways = -(-consumers // max(1, len(left)))
    return tuple(
        replace(shard, state=(state, *shard.state[1:]))
        for shard in left
        for state in stream.split_state(shard.state[0], ways)
    )


def _with_initial_state(shard: StreamShard, state: SavedState, stream: Any) -> StreamShard:
    """Return a shard that any rank can resume: one that was never begun gets the state it would begin with."""
    if shard.state is not None or not isinstance(stream, Stream):
        return shard
    initial = stream.initial_state(
        epoch=state["epoch"],
        base_seed=state["base_seed"],
        rank=state["rank"],
        ranks=state["world"],
        worker=shard.number,
        workers=max(1, shard.of),
    )
    return replace(shard, state=(initial, None, 0))
