"""What `DataLoader.state_dict` returns, and what `load_state_dict` does with it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import StateError
from penstock.data.stream import Stream
from penstock.distributed.rank import rank_and_world_size
from penstock.loader.begin_epoch import epoch_of_dataset, fingerprint_of, next_pass
from penstock.loader.checkpoint.dataset_fingerprint import fingerprint
from penstock.loader.checkpoint.numpy_values import with_numpy, without_numpy
from penstock.loader.checkpoint.rank_states import RankStates, one_of_each_share, states_for_rank
from penstock.loader.checkpoint.resume import Resume, resume_from
from penstock.loader.checkpoint.state import VERSION, check_states, describe_owner, packed, unpacked
from penstock.loader.config import LoaderConfig
from penstock.loader.runtime import LoaderRuntime
from penstock.loader.sampling.orders import drawn_from, order_for
from penstock.loader.sampling.unknown_order import UnknownOrder
from penstock.loader.workers.worker_spec import is_stateful

_OTHERS = ("indices", "sampler", "shards", "next")
"""What may hold the state of somebody else's dataset or sampler."""


def state_dict_of(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, Any]:
    """Return the state of a loader; its fields are described in `checkpoint.state`."""
    if runtime.loaded is not None:
        return runtime.loaded
    _refuse_threads(config)
    epoch = runtime.epoch
    state = {
        "version": VERSION,
        "owner": _owner(config, runtime),
        "fingerprint": {"rank": rank_and_world_size()[0], "parts": {**fingerprint_of(config, runtime)}},
        "seed": epoch.epoch_seed if epoch is not None else 0,
        "base_seed": epoch.base_seed if epoch is not None else 0,
        "generator": config.generator.get_state() if config.generator is not None else None,
        **(epoch.as_dict() if epoch is not None else _not_begun(config, runtime)),
    }
    if epoch is None or epoch.finished:
        state["next"] = next_pass(config, runtime)
    return packed(state | {name: without_numpy(state[name]) for name in _OTHERS if name in state})


def _not_begun(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, Any]:
    state: dict[str, Any] = {
        "epoch": runtime.next_epoch,
        "finished": False,
        "rank": config.rank,
        "world": config.world_size,
    }
    if not config.is_iterable:
        state["sampler"] = runtime.order.end_state()
    if config.keeps_state and config.num_workers == 0:
        state["shards"] = [{"state": config.dataset.state_dict()}]
    return state


def _refuse_threads(config: LoaderConfig) -> None:
    """Raise StateError where several threads advance one dataset's state, ahead of the loop."""
    if config.keeps_state and config.is_threaded:
        raise StateError(
            f"{type(config.dataset).__qualname__} keeps a state, and threads share it: what it was at the last batch "
            "that was handed out is not known; use worker_type='process', or num_workers=0"
        )


def load_state_dict(config: LoaderConfig, runtime: LoaderRuntime, state: Any) -> None:
    """Have the next pass resume where `state` was taken; see `DataLoader.load_state_dict`.

    Raises:
        StateError: the state belongs to another dataset or sampler, or the states of other ranks are needed.
    """
    given = _as_list(state)
    if not given or not given[0]:
        return
    _refuse_threads(config)
    states = _read(given, config)
    sampler = drawn_from(config.index_sampler)
    check_states(states, _owner(config, runtime), fingerprint(config.dataset, sampler))
    states = _of_this_rank(states, config, runtime)
    stream = config.dataset if isinstance(config.dataset, Stream) else None
    resume = resume_from(
        states,
        order=None if config.is_iterable else order_for(config.index_sampler, snapshot_every=1),
        rank=config.rank,
        world=config.world_size,
        stream=stream,
        workers=config.num_workers,
    )
    if resume.sampler is not None:
        runtime.order.begin_after(resume.sampler)
    if config.worker_type == "thread" and stream is None and any(shard.of > 1 for shard in resume.shards):
        raise StateError(
            "this state's workers read get_worker_info() to share out the samples, and threads have none; resume with "
            "worker_type='process', or num_workers=0"
        )
    _warn_of_repeated_work(resume, config.dataset)
    runtime.resume, runtime.is_epoch_set = resume, False
    if (earlier := epoch_of_dataset(config)) is not None:
        config.dataset.begin_epoch(earlier)  # it is set no more: the state says which
    several = [packed(without_numpy(one)) for one in states] if len(states) > 1 else []
    runtime.loaded = packed(without_numpy(states[0]), several, is_loaded=True)


def _owner(config: LoaderConfig, runtime: LoaderRuntime) -> dict[str, Any]:
    """Return which dataset and sampler a state belongs to; looked at once in each pass."""
    if runtime.owner is None or runtime.epoch is None:
        order = None if config.is_iterable else runtime.order
        runtime.owner = describe_owner(config.dataset, drawn_from(config.index_sampler), order)
    return {**runtime.owner, "traits": {**runtime.owner["traits"]}}


def _as_list(state: Any) -> Sequence[Any]:
    if isinstance(state, Mapping):
        return [state]
    if not isinstance(state, Sequence) or not all(isinstance(one, Mapping) for one in state):
        raise StateError(f"a state is a dict, or a list of the dicts of all ranks, not {str(state)[:100]}")
    return state


def _read(given: Sequence[Any], config: LoaderConfig) -> list[dict[str, Any]]:
    """Return the states that were given, or those that `torch.distributed.checkpoint` has loaded into one."""
    ranks = given[0].get("all_ranks")
    saved = ranks.loaded() if type(ranks) is RankStates else []
    if not saved:
        unmarked: list[dict[str, Any]] = with_numpy([one for outer in given for one in unpacked(outer)])
        if len(unmarked) == 1 or not config.is_distributed:
            return unmarked
        return [*one_of_each_share(unmarked, is_shared=True).values()]  # ranks of one replica have the same
    states = with_numpy([one | {"is_loaded": outer["is_loaded"]} for outer in saved for one in unpacked(outer)])
    share = config.rank, config.world_size
    return states_for_rank(states, is_iterable=config.is_iterable, share=share, is_shared=config.is_distributed)


def _of_this_rank(states: list[Any], config: LoaderConfig, runtime: LoaderRuntime) -> list[Any]:
    """Return the states to resume from: this rank's alone where no loader shares the samples out among ranks."""
    shares_out = config.world_size > 1 or any(state["world"] > 1 for state in states)
    if config.is_iterable or len(states) == 1 or (shares_out and not isinstance(runtime.order, UnknownOrder)):
        return states
    rank, world = rank_and_world_size()
    if len(states) != world:
        raise StateError(f"{len(states)} states were given, and there are {world} ranks; load each rank's own")
    return [states[rank]]


def _warn_of_repeated_work(resume: Resume, dataset: Any) -> None:
    lost = [shard.since for shard in resume.shards if shard.state is None and shard.since]
    if lost and not is_stateful(dataset):
        samples = sum(batches * size for since in lost for batches, size in since)
        warnings.warn(
            f"{type(dataset).__qualname__} has no state_dict and load_state_dict, and neither has its iterator: the "
            f"first {samples} samples of this epoch are made again and discarded before its next batch",
            stacklevel=4,
        )
