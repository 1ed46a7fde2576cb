"""How batches of one shape are opened: their envelopes begin with the same bytes, which describe them, and have a plan.

What comes again is not parsed again: a plan has the place of each tensor, and a function that puts the tensors together
to the batch. They are views of the slot; or tensors on a device, see `to_device.copy_plan`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.core import plain_tree
from penstock.loader.transport import codec

_MOST_PLANS = 64
_MOST_NBYTES = 8192
"""Longer descriptions have text or numbers in them, which hardly come again."""


class EnvelopePlan:
    """The plan of batches whose envelopes begin as one does.

    Args:
        envelope: of a plain tree.
    """

    def __init__(self, envelope: bytes) -> None:
        self.offsets, node = codec.describe(envelope)
        self.nodes, self.build = plain_tree.compiled(node)
        self.has_empty = plain_tree.has_empty(node)
        """Whether it makes tensors without elements, which are on the host."""
        self.inline_start = codec.description_nbytes(envelope) if codec.is_inline(envelope) else 0
        """Where the buffers begin in the envelope, if they are there and not in a slot."""
        self.on_device: Any = None
        """What `to_device.copy_plan` keeps here."""
        self._views = [
            (partial(torch.frombuffer, dtype=node.dtype, count=node.elements, offset=offset), *_shape(node))
            for offset, node in zip(self.offsets, self.nodes, strict=True)
        ]

    def open(self, memory: np.ndarray) -> Any:
        """Return the batch as views of the memory (uint8) of its slot, or of its envelope's buffers."""
        tensors = []
        for view, size, of in self._views:
            flat = view(memory)
            tensors.append(flat if size is None else flat.view(size) if of is None else of(flat))
        return self.build(tensors)


def _shape(node: plain_tree.TensorNode) -> tuple[Any, Any]:
    """Return what a flat tensor becomes: another size (None if it stays flat), or what a function makes of it."""
    is_dense = node.stride is None and not node.requires_grad
    return (None if node.is_flat else node.size), None if is_dense else node.of


class EnvelopePlans:
    """The plans of what has come more than once."""

    def __init__(self) -> None:
        self._plans: dict[bytes, EnvelopePlan | None] = {}

    def of(self, envelope: bytes) -> EnvelopePlan | None:
        """Return the plan of an envelope; None for the first of its kind, and for what is no plain tree.

        >>> from penstock.loader.transport.arena import Arena
        >>> arena = Arena(np.empty(1 << 16, np.uint8))
        >>> envelope = codec.encode({"x": torch.arange(5000)}, arena)
        >>> plans = EnvelopePlans()
        >>> plans.of(envelope) is None
        True
        >>> plans.of(envelope).open(arena.memory)["x"][:3]
        tensor([0, 1, 2])
        """
        plan = self._plans.get(envelope)
        return self._look(envelope) if plan is None else plan

    def _look(self, envelope: bytes) -> EnvelopePlan | None:
        nbytes = codec.description_nbytes(envelope)
        if not 0 < nbytes <= _MOST_NBYTES:
            return None
        described = envelope[:nbytes]
        plan = self._plans.get(described)
        if plan is None:
            plan = EnvelopePlan(envelope) if described in self._plans else None
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[described] = plan
        return plan
