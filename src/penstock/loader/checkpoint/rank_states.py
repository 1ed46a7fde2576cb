"""RankStates: what `torch.distributed.checkpoint` (DCP) saves of a loader's state, so that any ranks can load it all.

DCP keeps one copy of a key that all ranks have, and loads only the keys that a fresh object has, which cannot know how
many ranks have saved. So all ranks' states are one tensor to DCP, uint8[ranks x ROW_NBYTES], of which each rank writes
its row, and each rank that loads reads all the rows there are. DCP asks for parts of a tensor by three methods
(`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`).

    row        magic, 4 bytes · rank, world, nbytes: each 4 bytes, little-endian · a pickled state, compressed · zeros

A single rank uses as many rows as it needs.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import StateError
from penstock.distributed.rank import rank_and_world_size
from penstock.loader.checkpoint.numpy_values import without_numpy
from penstock.loader.sampling.unknown_order import is_same_state

ROW_NBYTES = 16 << 10
_HEAD = struct.Struct("<4sIII")
_MAGIC = b"pnst"
_MOST_ROWS = 1 << 14


class _AnySize:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class RankStates(str):
    """An empty text, with this rank's state when DCP saves it, and the states of all ranks when DCP has loaded it.

    A text for JSON, and for programs that move every tensor of a checkpoint. DCP is told that it is a tensor, as mocks
    say what they stand for, because it asks only tensors for their parts. Other checkpoints have nothing of it.

    Args:
        state: of this rank.
    """

    __slots__ = ("_rank", "_rows", "_state", "_world")

    _state: Mapping[str, Any]
    _rank: int
    _world: int
    _rows: dict[int, Tensor]

    def __new__(cls, state: Mapping[str, Any]) -> RankStates:
        """Make the empty text."""
        self = super().__new__(cls, "")
        self._state = state
        self._rank, self._world = rank_and_world_size()
        self._rows = {}
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What `isinstance` goes by, which is called by the frame that asks."""
        is_dcp = sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.utils"
        return Tensor if is_dcp else RankStates

    def size(self) -> _AnySize:
        """Return what no saved tensor's size differs from."""
        return _AnySize()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as something empty that `torch.load(weights_only=True)` knows."""
        return OrderedDict, ()

    def __deepcopy__(self, memo: Any) -> RankStates:
        """Stay: nothing changes this object before DCP has written it."""
        return self

    def loaded(self) -> list[Mapping[str, Any]]:
        """Return the states of all ranks, in their order, after DCP has loaded them; none if it has not.

        Raises:
            StateError: the row of a rank is missing.
        """
        blobs: dict[int, bytes] = {}
        world = 0
        for place in sorted(self._rows):
            row = self._rows[place].numpy().tobytes()
            magic, rank, world, nbytes = _HEAD.unpack_from(row)
            if magic != _MAGIC:
                raise StateError(
                    "this checkpoint has a loader's states of ranks in a form that this penstock cannot read"
                )
            blobs[rank] = blobs.get(rank, b"") + row[_HEAD.size :]
            if len(blobs[rank]) >= nbytes:
                blobs[rank] = blobs[rank][:nbytes]
        if blobs and sorted(blobs) != list(range(world)):
            raise StateError(f"this checkpoint has the loader's states of ranks {sorted(blobs)}, of {world} ranks")
        return [_unpickled(blobs[rank]) for rank in sorted(blobs)]

    # ── what DCP calls ──────────────────────────────────────────────────────────────────────────────────────

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._rows = self._own_rows()
        size = torch.Size([max(self._world, len(self._rows)) * ROW_NBYTES])
        items = []
        for place, row in self._rows.items():
            chunk = ChunkStorageMetadata(torch.Size([place * ROW_NBYTES]), row.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(row), size)
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._rows = {}
        row = torch.Size([ROW_NBYTES])
        return [ChunkStorageMetadata(torch.Size([place * ROW_NBYTES]), row) for place in range(_MOST_ROWS)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self._rows.setdefault(index.offset[0] // ROW_NBYTES, torch.zeros(ROW_NBYTES, dtype=torch.uint8))

    def _own_rows(self) -> dict[int, Tensor]:
        blob = _pickled(self._state)
        room = ROW_NBYTES - _HEAD.size
        if len(blob) > room and self._world > 1:
            raise StateError(
                f"the loader's state on rank {self._rank} has {len(blob)} bytes, and torch.distributed.checkpoint can "
                f"share out at most {room} for each of several ranks; save the list of all ranks' states instead "
                "(torch.distributed.all_gather_object), and have load_state_dict load that"
            )
        head = _HEAD.pack(_MAGIC, self._rank, self._world, len(blob))
        parts = [blob[at : at + room] for at in range(0, len(blob), room)]
        rows = [bytearray((head + part).ljust(ROW_NBYTES, b"\0")) for part in parts]
        return {self._rank + place: torch.frombuffer(row, dtype=torch.uint8) for place, row in enumerate(rows)}


def states_for_rank(
    states: Sequence[dict[str, Any]], *, is_iterable: bool, share: tuple[int, int], is_shared: bool
) -> list[dict[str, Any]]:
    """Return which of all ranks' states this rank resumes from.

    With as many ranks as before, a rank has its own where that is enough. Otherwise the ranks' shares of the samples
    are put together: one state of each share, because ranks of one share (of a model that is split) have the same. Some
    of these may read nothing, as the middle stages of a pipeline: the state that is furthest on is the share's.

    Args:
        states: of all ranks, in their order.
        is_iterable: whether the dataset yields its samples.
        share: this rank among those that share out the samples, and how many they are.
        is_shared: whether the loader shares out samples; else each rank may be at a place of its own.

    Raises:
        StateError: each rank had an order for itself, and there are other ranks now.
    """
    rank, world = rank_and_world_size()
    as_many, own = len(states) == world, states[rank % len(states)]
    if is_shared:
        states = [state for state in states if "digest" in state and not state["is_loaded"]] or states
    shares = one_of_each_share(states, is_shared=is_shared)
    if as_many and is_shared:
        furthest = shares.get(share) or max(states, key=_progress)
        is_own = any(own is state for state in states) and _share_of(own) == _share_of(furthest)
        own = own if is_own and _progress(own) == _progress(furthest) else furthest
    if as_many:
        if is_iterable:
            is_enough = _share_of(own) == share
        else:
            is_enough = all(state.get("indices", {}).get("in_order", True) for state in states)
        if is_enough or len(shares) == 1:
            return [_with_its_epoch(own, states)]
    if len(shares) > 1:
        return [state for _, state in sorted(shares.items())]
    if len(states) > 1 and any("next" not in state for state in states):
        # No rank has a share of an order that the others have; they may all have the same, or each its own.
        orders = [without_numpy([state.get("indices"), state.get("shards")]) for state in states]
        if not is_shared and not all(is_same_state(one, orders[0]) for one in orders[1:]):
            raise StateError(
                f"each of {len(states)} ranks was at another place of an order of its own, and now there are {world} "
                "ranks; resume with as many, or let the loader share out one order (distributed=True)"
            )
    return [*shares.values()]


def one_of_each_share(states: Sequence[dict[str, Any]], *, is_shared: bool) -> dict[tuple[int, int], dict[str, Any]]:
    """Return a state of each share of the samples: with `is_shared` the one that is furthest on, else the first."""
    shares: dict[tuple[int, int], dict[str, Any]] = {}
    for state in states:
        found = shares.setdefault(_share_of(state), state)
        if is_shared and _progress(state) > _progress(found):
            shares[_share_of(state)] = state
    return shares


def _with_its_epoch(own: dict[str, Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a rank's state; where it has come to the end of an epoch before others, with nothing left of that epoch.

    Else this rank would go on with the next epoch, and be one ahead of the others.
    """
    if "next" in own and any(state["epoch"] == own["epoch"] and "next" not in state for state in states):
        return {name: value for name, value in own.items() if name != "next"}
    return own


def _progress(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the pass of a state, and how much of it was handed out; of a stream, only whether it was begun."""
    handed_out = int("shards" in state)
    if (indices := state.get("indices")) is not None:
        start = indices["start"]
        handed_out = start["position"] - len(start["leftover"]) + indices["taken"] * indices["world"]
    return state["epoch"] + state["finished"], 0 if state["finished"] else handed_out


def _share_of(state: Mapping[str, Any]) -> tuple[int, int]:
    share = state.get("indices", state)
    return (share["rank"], share["world"]) if share["world"] > 1 else (state["rank"], state["world"])


def _pickled(state: Mapping[str, Any]) -> bytes:
    written = io.BytesIO()
    torch.save(state, written)
    _loaded(written.getvalue())  # better now than when the run has ended
    return zlib.compress(written.getvalue())


def _unpickled(blob: bytes) -> Mapping[str, Any]:
    try:
        return _loaded(zlib.decompress(blob))
    except zlib.error as error:
        raise StateError(f"the loader's state in this checkpoint is damaged: {error}") from error


def _loaded(saved: bytes) -> Mapping[str, Any]:
    """Return what `torch.save` has written of a state: plain data, since a pickle of another's could run code."""
    try:
        state = torch.load(io.BytesIO(saved), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise StateError(
            "torch.distributed.checkpoint keeps of a loader's state what torch.load(weights_only=True) reads: numbers, "
            "texts, tensors, arrays, and lists, tuples and dicts of them; have the dataset's and the sampler's "
            "state_dict() return such, or name its classes by torch.serialization.add_safe_globals "
            f"({str(error).partition(chr(10))[0]})"
        ) from error
    if not isinstance(state, Mapping):
        raise StateError(f"the loader's state in this checkpoint is damaged: it is a {type(state).__name__}")
    return state
