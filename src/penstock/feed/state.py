"""A loader's state: what a checkpoint holds so that another loader goes on with what was not handed out.

    version, of         the format; which dataset and sampler it belongs to
    contents            digests of what those consist of, on the rank that has saved it; see `contents`
    epoch, finished     which pass, and whether it had come to its end
    seed, base_seed     of the samples' randomness (see `sample_seed`), and of the workers' random states, as in torch
    generator           the state of the loader's own generator
    indices, sampler    map-style datasets: where the cursor of batches was; after an epoch, the sampler's own state
    lanes               iterable datasets: where each lane was, or the state of its dataset at the end

It is made of numbers, words, lists, dicts and small tensors, and does not grow with the position.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.core.errors import StateError
from penstock.distributed.place import place
from penstock.feed.contents import contents, entries
from penstock.feed.cursor import Begun, Taken, going_on
from penstock.feed.orders import Order
from penstock.feed.sources.stream import Stream
from penstock.feed.stream_cursor import lane_of
from penstock.feed.workers.lanes import Lane

VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Where a loader's next pass begins."""

    epoch: int
    generator: torch.Tensor | None = None
    begun: Begun | None = None
    """Of a map-style dataset; None at the beginning of an epoch."""
    lanes: tuple[Lane, ...] | None = None
    """Of an iterable dataset; None at the beginning of an epoch."""
    turn: int = 0
    """The lane whose batch comes first."""
    seed: int = 0
    base_seed: int | None = None
    stream_epoch: int | None = None
    sampler: dict[str, Any] | None = None
    """What the sampler had before the epoch."""
    ends: tuple[Any, ...] = ()
    """What an iterable dataset has said of itself at the end of the epoch before, in each lane."""

    @property
    def in_the_middle(self) -> bool:
        """Whether some of the epoch's order is known already."""
        return self.lanes is not None or (self.begun is not None and self.begun.how is not None)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a dataset and a sampler consist of; see `contents`."""

    parts: dict[str, str]
    entries: dict[str, str]

    @classmethod
    def of(cls, dataset: Any, sampler: Any) -> Seen:
        """Look at them."""
        return cls(contents(dataset, sampler), entries(dataset))


def belonging(dataset: Any, sampler: Any, order: Order | None) -> dict[str, Any]:
    """Return what a state belongs to, in plain words.

    >>> from torch.utils.data import SequentialSampler
    >>> belonging([1, 2, 3], SequentialSampler([1, 2, 3]), None)
    {'dataset': 'list', 'samples': 3, 'sampler': 'SequentialSampler', 'traits': {}}
    """
    traits = dataset.traits() if isinstance(dataset, Stream) else order.traits() if order is not None else {}
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        samples = None
    return {
        "dataset": type(dataset).__qualname__,
        "samples": samples,
        "sampler": type(sampler).__qualname__,
        "traits": traits,
    }


def check(states: Sequence[Any], of: Mapping[str, Any], seen: Seen) -> None:
    """See whether these are states of the same kind of loader, over the same contents.

    Args:
        states: of one rank, or of all.
        of: what the loader's states belong to; see `belonging`.
        seen: the contents of its dataset and sampler. Those of another rank may be others.

    Raises:
        StateError: one is not.

    Warns:
        UserWarning: numbers that may be the samples' are others.
    """
    for state in states:
        if not isinstance(state, Mapping) or "version" not in state or "of" not in state:
            raise StateError(f"this is no state of a penstock.DataLoader: {str(state)[:200]}")
        if state["version"] != VERSION:
            raise StateError(
                f"this state has version {state['version']}, and this penstock reads version {VERSION}; go on with "
                "the penstock that has saved it, to the end of the epoch"
            )
        if state["of"] != of:
            raise StateError(f"this state is of {_words(state['of'])}, and this loader has {_words(of)}")
        told = state.get("contents")
        if told is None or told["rank"] != place()[0]:
            continue
        if others := _others(told["parts"], seen.parts):
            raise StateError(
                f"this state is of another {_words(of)}: other contents of {', '.join(others)}; go on with those that "
                "it was saved with, or, where the samples are the same nonetheless, without state['contents']"
            )

        if others := _others(told["entries"], seen.entries):
            warnings.warn(
                f"{', '.join(others)} had other entries when this state was saved; if these are what samples are made "
                "of, and no cache, the state is of another dataset",
                stacklevel=3,
            )


def _others(told: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of what had other contents."""
    return [name for name, digest in told.items() if now.get(name, digest) != digest]


def resume_of(
    states: Sequence[Mapping[str, Any]], *, order: Order | None, world: int, rank: int, stream: Any, workers: int
) -> Resume:
    """Return where the next pass begins, after states that `check` has let pass.

    Args:
        states: of one rank, or of all.
        order: that of the loader which goes on, for a map-style dataset.
        world: how many ranks there are now.
        rank: which of them this is.
        stream: the loader's dataset, where it is one of penstock's streams.
        workers: how many this loader has.

    Raises:
        StateError: more states are needed, or they cannot be gone on from here.
    """
    one = states[0]
    if any(state["epoch"] != one["epoch"] for state in states):
        raise StateError("these states were not taken in the same epoch; load those that were saved together")
    stream_epoch = one.get("stream_epoch")
    if all(state["finished"] for state in states):
        following = stream_epoch + 1 if stream_epoch is not None else None
        own = next((state for state in states if state["rank"] == rank), one)
        is_own = (own["rank"], own["world"]) == (rank, world) and stream is None
        return Resume(
            epoch=one["epoch"] + 1,
            generator=one["generator"],
            stream_epoch=following,
            sampler=own.get("sampler"),
            ends=tuple(told["end"] for told in own.get("lanes", ())) if is_own else (),
            base_seed=own["base_seed"],
        )
    if "lanes" not in one and "indices" not in one:
        return Resume(epoch=one["epoch"], generator=one["generator"])
    own = next((state for state in states if state.get("rank") == rank), one)
    seeds = {"seed": own["seed"], "base_seed": own["base_seed"], "generator": own["generator"]}
    if "lanes" in one:
        lanes = _lanes(states, world, rank, stream, max(1, workers))
        turn = one["turn"] if len(lanes) == len(one["lanes"]) and len(states) == 1 else 0
        return Resume(epoch=one["epoch"], lanes=lanes, turn=turn, stream_epoch=stream_epoch, **seeds)
    begun = going_on([Taken.of(state["indices"]) for state in states], order)
    return Resume(epoch=one["epoch"], begun=begun, sampler=own.get("sampler"), **seeds)


def _lanes(states: Sequence[Mapping[str, Any]], world: int, rank: int, stream: Any, workers: int) -> tuple[Lane, ...]:
    """Return what this rank goes on with: its own lanes, or its share of everybody's."""
    saved = int(states[0]["world"])
    if len(states) == 1 and saved == world:
        if states[0]["rank"] != rank:
            raise StateError(f"this is the state of rank {states[0]['rank']}, and this is rank {rank}; load its own")
        return _split([_filled(lane_of(told), states[0], stream) for told in states[0]["lanes"]], workers, stream)
    if sorted(state["rank"] for state in states) != list(range(saved)):
        raise StateError(
            f"{saved} ranks had shares of this stream, and now there are {world}; load the states of all of them: "
            "loader.load_state_dict([state of rank 0, state of rank 1, ...])"
        )
    if not isinstance(stream, Stream) and saved != world:
        raise StateError(
            f"this state is of {saved} ranks, and here are {world}: the dataset shares out its samples among ranks by "
            "itself, so only as many can go on; penstock.open(...).stream() can be shared out anew"
        )
    left = [(state, told) for state in states for told in state["lanes"] if not told["ended"]]
    lanes = [_filled(lane_of(told), state, stream) for state, told in left]
    return _split(lanes, workers * world, stream)[rank::world]


def _split(lanes: list[Lane], consumers: int, stream: Any) -> tuple[Lane, ...]:
    """Return at least as many lanes as there are consumers, where the dataset can share out what is left of one."""
    if not isinstance(stream, Stream) or not lanes:
        return tuple(lanes)
    left = [lane for lane in lanes if not lane.has_ended]
    ways = -(-consumers // max(1, len(left)))
    if ways == 1 or any(lane.since for lane in left):
        return tuple(lanes)
    return tuple(
        replace(lane, state=(state, *lane.state[1:]))
        for lane in left
        for state in stream.split_state(lane.state[0], ways)
    )


def _filled(lane: Lane, state: Mapping[str, Any], stream: Any) -> Lane:
    """Return a lane that any rank can go on with: one that was not begun gets the state that it would begin with."""
    if lane.state is not None or not isinstance(stream, Stream):
        return lane
    begins = stream.begin_state(
        epoch=state["stream_epoch"],
        base_seed=state["base_seed"],
        rank=state["rank"],
        ranks=state["world"],
        worker=lane.number,
        workers=max(1, lane.of),
    )
    return replace(lane, state=(begins, None, 0))


def _words(of: Mapping[str, Any]) -> str:
    samples = "" if of["samples"] is None else f" with {of['samples']} samples"
    traits = ", ".join(f"{name}={value}" for name, value in of["traits"].items())
    return f"{of['dataset']}{samples} by {of['sampler']}" + (f" ({traits})" if traits else "")
