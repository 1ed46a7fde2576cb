"""The state of a loader as a checkpoint holds it: its fields, and whether it belongs to a loader.

    version             of this format
    epoch, finished     which pass, and whether it had reached its end
    rank, world         whose state this is, of how many
    fingerprint         what dataset and sampler consist of, on this rank; see `dataset_fingerprint`
    rest                all that follows
    all_ranks           empty; what `torch.distributed.checkpoint` saves of each rank, where that is imported. See
                        `rank_states`

    owner               which dataset and sampler the state belongs to
    seed, base_seed     of the samples' randomness (see `sample_seed`), and of the workers' random states, as in torch
    generator           the state of the loader's own generator
    indices, sampler    map-style datasets: the position of the batch cursor; between epochs, the sampler's own state
    shards              iterable datasets: the position of each shard, or the state of its dataset at the end;
                        map-style ones that keep a state: that of each worker
    digest              of what has been handed out in this epoch, on this rank; see `PassDigest.state`
    next                between epochs: torch's random state, from which the next one is drawn; see `next_pass`

A state consists of numbers, text, lists, dicts and small tensors, and does not grow with the position. It has the same
names at every position: `torch.distributed.checkpoint` loads those that a fresh loader's state has. It looks into
dicts, and not into tuples; so what has other names at other times is in a tuple of one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import StateError
from penstock.data.stream import Stream
from penstock.distributed.rank import rank_and_world_size
from penstock.loader.checkpoint.rank_states import RankStates
from penstock.loader.sampling.orders import Order

VERSION = 8

_HEAD = ("version", "epoch", "finished", "rank", "world")

_ALWAYS = ("owner", "seed", "base_seed", "generator")

_SOMETIMES = ("indices", "sampler", "shards", "turn", "digest", "next")


def packed(
    state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]] = (), *, is_loaded: bool = False
) -> dict[str, Any]:
    """Return a state in the form that a checkpoint holds.

    Args:
        state: with the names above that it has.
        ranks: the states of all ranks, where one is not enough and they were loaded; packed.
        is_loaded: whether it was loaded, and no pass was begun since. Only torch.distributed.checkpoint saves that.
    """
    rest: dict[str, Any] = {name: state[name] for name in _ALWAYS} | {name: state.get(name) for name in _SOMETIMES}
    outer = {name: state[name] for name in _HEAD}
    outer["fingerprint"] = (state["fingerprint"],) if state.get("fingerprint") is not None else None
    outer["rest"] = ({**rest, "ranks": [*ranks]},)
    if "torch.distributed.checkpoint" in sys.modules:
        outer["all_ranks"] = RankStates({**outer, "is_loaded": is_loaded})
    return outer


def unpacked(outer: Any) -> list[dict[str, Any]]:
    """Return the state that `packed` was given; or the states of all ranks, if there were some.

    Raises:
        StateError: this is no state, or parts of one are missing.
    """
    if not isinstance(outer, Mapping) or "version" not in outer:
        raise StateError(f"this is no state of a penstock.DataLoader: {str(outer)[:200]}")
    if outer["version"] != VERSION:
        raise StateError(
            f"this state has version {outer['version']}, and this penstock reads version {VERSION}; finish the epoch "
            "with the penstock that saved it"
        )
    missing = [name for name in (*_HEAD, "fingerprint", "rest") if name not in outer]
    rest = {} if missing else outer["rest"][0]
    missing += [] if missing else [name for name in (*_ALWAYS, *_SOMETIMES, "ranks") if name not in rest]
    if missing:
        raise StateError(
            f"this state is not whole: {', '.join(missing)} is missing; load all that state_dict() returned"
        )
    if rest["ranks"]:
        return [one for rank in rest["ranks"] for one in unpacked(rank)]
    state = {name: outer[name] for name in _HEAD} | {name: rest[name] for name in _ALWAYS}
    state["fingerprint"] = outer["fingerprint"][0] if outer["fingerprint"] else None
    return [state | {name: rest[name] for name in _SOMETIMES if rest[name] is not None}]


def describe_owner(dataset: Any, sampler: Any, order: Order | None) -> dict[str, Any]:
    """Return which dataset and sampler a state belongs to, as plain values.

    >>> from torch.utils.data import SequentialSampler
    >>> describe_owner([1, 2, 3], SequentialSampler([1, 2, 3]), None)
    {'dataset': 'list', 'samples': 3, 'sampler': 'SequentialSampler', 'traits': {}}
    """
    traits = dataset.traits() if isinstance(dataset, Stream) else order.traits() if order is not None else {}
    samples = None
    if not isinstance(dataset, Stream):  # whose length is that of this rank's share in this epoch
        with contextlib.suppress(TypeError, NotImplementedError):
            samples = len(dataset)
    return {
        "dataset": type(dataset).__qualname__,
        "samples": samples,
        "sampler": type(sampler).__qualname__,
        "traits": traits,
    }


def check_states(states: Sequence[Any], owner: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    """Check that these are states of the same kind of loader, over the same contents.

    Args:
        states: of one rank, or of all.
        owner: which dataset and sampler the loader has; see `describe_owner`.
        fingerprint: of its dataset and sampler. Another rank's may differ, and is not compared.

    Raises:
        StateError: a state has another owner, or another fingerprint.
    """
    for state in states:
        if state["owner"] != owner:
            raise StateError(
                f"this state belongs to {_owner_text(state['owner'])}, and this loader has {_owner_text(owner)}"
            )
        _check_fingerprint(state, owner, fingerprint)


def _check_fingerprint(state: Mapping[str, Any], owner: Mapping[str, Any], now: Mapping[str, str]) -> None:
    saved = state.get("fingerprint")
    if saved is None or saved["rank"] != rank_and_world_size()[0]:
        return
    changed = [name for name, digest in saved["parts"].items() if now.get(name, digest) != digest]
    if changed:
        raise StateError(
            f"this state belongs to another {_owner_text(owner)}: other contents of {', '.join(changed)}; resume with "
            "the data it was saved with, or, if the samples are equal nonetheless, set state['fingerprint'] = None"
        )


def _owner_text(owner: Mapping[str, Any]) -> str:
    samples = "" if owner["samples"] is None else f" with {owner['samples']} samples"
    traits = ", ".join(f"{name}={value}" for name, value in owner["traits"].items())
    return f"{owner['dataset']}{samples} by {owner['sampler']}" + (f" ({traits})" if traits else "")
