"""CopyPlan: how the batches of one plan are copied from their slots to a device, without tensors on the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from penstock.core.plain_tree import TensorNode
from penstock.device.base import TensorSpec
from penstock.loader.scheduling.batch import Batch, Opener
from penstock.loader.transport.envelope_plan import EnvelopePlan
from penstock.loader.transport.ring import Ring, Slot

_SMALL_NBYTES = 64 << 10
_LEAST_TOGETHER = 4
"""So many tensors, each smaller, that lie side by side are copied in one piece, which any of them keeps alive on the
device. For fewer it is not worth what it takes to cut them out."""

_GAP_NBYTES = 256
_GRAIN = 16
"""Tensors that are cut out begin at a multiple of this: the size of the largest dtype."""


class CopyPlan:
    """What to copy: parts of a slot, each to a tensor of the batch, or to bytes that small tensors are cut from.

    Args:
        plan: of batches in slots, whose tensors `is_copyable`.
    """

    def __init__(self, plan: EnvelopePlan) -> None:
        self._plan = plan
        rows: list[list[int]] = []
        for number in sorted(range(len(plan.nodes)), key=plan.offsets.__getitem__):
            rows[-1].append(number) if rows and self._lie_together(rows[-1][-1], number) else rows.append([number])
        self._rows = [
            part for row in rows for part in ([row] if len(row) >= _LEAST_TOGETHER else [[one] for one in row])
        ]
        """The numbers of the tensors in each part."""
        self.parts = tuple(map(self._part, self._rows))
        """The offset and the bytes of each."""
        self.specs = tuple(map(self._spec, self._rows))
        """Of the tensors that they are copied to."""
        self.end = max(offset + nbytes for offset, nbytes in self.parts)
        """How many bytes of the slot are read."""
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        """On the device."""
        is_direct = self._rows == [[number] for number in range(len(plan.nodes))]
        self.build = plan.build if is_direct else self._build
        """Returns the batch of the tensors that `parts` were copied to."""

    def _build(self, copied: Sequence[torch.Tensor]) -> Any:
        tensors: list[Any] = [None] * len(self._plan.nodes)
        for row, there in zip(self._rows, copied, strict=True):
            if len(row) == 1:
                tensors[row[0]] = there
            else:
                self._cut(row, there, tensors)
        return self._plan.build(tensors)

    def _cut(self, row: list[int], memory: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Cut tensors from bytes, each with a version counter of its own, as separate tensors have."""
        seen: dict[torch.dtype, torch.Tensor] = {}
        first = self._plan.offsets[row[0]]
        for number in row:
            node = self._plan.nodes[number]
            if node.dtype not in seen:
                seen[node.dtype] = memory.view(node.dtype)
            place = (self._plan.offsets[number] - first) // node.dtype.itemsize
            tensors[number] = seen[node.dtype].as_strided(node.size, _stride(node), place).data

    def _part(self, row: list[int]) -> tuple[int, int]:
        offset = self._plan.offsets[row[0]]
        return offset, self._plan.offsets[row[-1]] + self._nbytes(row[-1]) - offset

    def _spec(self, row: list[int]) -> TensorSpec:
        if len(row) == 1:
            node = self._plan.nodes[row[0]]
            return TensorSpec(torch.Size(node.size), _stride(node), node.dtype)
        nbytes = -(-self._part(row)[1] // _GRAIN) * _GRAIN  # to be seen as elements of any dtype
        return TensorSpec(torch.Size([nbytes]), (1,), torch.uint8)

    def _nbytes(self, number: int) -> int:
        return self._plan.nodes[number].elements * self._plan.nodes[number].dtype.itemsize

    def _lie_together(self, number: int, other: int) -> bool:
        offsets = self._plan.offsets
        end = offsets[number] + self._nbytes(number)
        is_near = end <= offsets[other] <= end + _GAP_NBYTES and (offsets[other] - offsets[number]) % _GRAIN == 0
        return is_near and max(self._nbytes(number), self._nbytes(other)) < _SMALL_NBYTES


def is_copyable(plan: EnvelopePlan) -> bool:
    """Return whether its batches lie in slots, and have tensors of which copying the bytes is enough."""
    is_in_slot = not plan.inline_start and bool(plan.nodes) and not plan.has_empty
    return is_in_slot and all(map(_is_dense, plan.nodes))


@functools.cache
def _row_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(size, device="meta").stride())


def _stride(node: TensorNode) -> tuple[int, ...]:
    return _row_stride(node.size) if node.stride is None else node.stride


def _is_dense(node: TensorNode) -> bool:
    """Return whether a tensor that has the same elements in the same places is what `.to(device)` would return."""
    if node.requires_grad:
        return False
    stride = _stride(node)
    there = torch.empty_like(torch.empty_strided(node.size, stride, device="meta")).stride()
    return all(one == other or size == 1 for one, other, size in zip(there, stride, node.size, strict=True))


class InSlot(NamedTuple):
    """A batch that lies in a page-locked slot, which nobody else has: what takes it frees the slot."""

    plan: CopyPlan
    slot: Slot
    """Ready."""
    ring: Ring


class SlotOpener(Opener):
    """Leaves batches in their slots, for a prefetcher to copy from; what cannot be copied so is opened."""

    def opened(self, batch: Batch, envelope: bytes, plan: EnvelopePlan | None) -> Any:
        """Return an `InSlot`, or the host batch."""
        slot = batch.slot
        if slot is not None and plan is not None:
            (copies,) = plan.on_device or self._look_at(plan)
            if copies is not None and copies.end <= slot.locked_nbytes:
                return InSlot(copies, slot, self.ring)
        return super().opened(batch, envelope, plan)

    @staticmethod
    def _look_at(plan: EnvelopePlan) -> tuple[CopyPlan | None]:
        found = (CopyPlan(plan) if is_copyable(plan) else None,)
        plan.on_device = found
        return found
