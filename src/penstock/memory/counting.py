"""Counting the bytes that tensors hold, by role, while a program runs: on real tensors, or on fake ones that hold none.

Every storage that an operation makes is counted from then until it dies, which its finalizer tells. What happens inside
of an operation is not seen: the workspace of a fused kernel is invisible.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.core.units import round_up
from penstock.distributed.peers import local
from penstock.memory.holdings import storage_key

Role = Literal["weights", "gradients", "optimizer", "activations", "temporaries", "inputs"]
ROLES: tuple[Role, ...] = ("weights", "gradients", "optimizer", "activations", "temporaries", "inputs")


ALLOCATOR_GRAIN = 512
"""The least that an allocation takes from CUDA's caching allocator, in bytes."""

_WITH_WORKSPACE = ("convolution", "lstm", "gru", "rnn", "cudnn", "miopen")


@dataclass(slots=True, eq=False)
class _Block:
    nbytes: int
    role: Role
    part: str


class Counting(TorchDispatchMode):
    """Counts while it is on.

    Args:
        grain: the least that an allocation takes: 512 bytes from CUDA's caching allocator.
        scalar: what `.item()` gives, where tensors are fake and hold no number.
        device: whose memory is counted; every device's by default.
    """

    def __init__(self, *, grain: int = 1, scalar: float | None = None, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.hidden: set[str] = set()
        """Operations seen that take memory of their own, which is not seen."""
        self.scalar = scalar
        self.part = ""
        """The part of the model that is running, for what is made from now on."""
        self._device = device
        self._grain = grain
        self._blocks: dict[int, _Block] = {}
        self._at_peak: list[_Block] = []
        self._is_host = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler for the first operation, which takes seconds

    def watch(self, tensors: Iterable[Tensor | None], role: Role) -> None:
        """Count these tensors, under `role` from now on."""
        for tensor in tensors:
            if tensor is not None:
                self._count(tensor, role)

    def watch_saved(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which what autograd saves is told apart as activations."""

        def saved(tensor: Tensor) -> Tensor:
            block = self._blocks.get(_key(tensor))
            if block is not None and block.role == "temporaries":
                block.role = "activations"
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor)

    def by_role(self) -> dict[Role, int]:
        """Return the bytes by role at the moment of the peak."""
        found: dict[Role, int] = dict.fromkeys(ROLES, 0)
        for block in self._at_peak:
            found[block.role] += block.nbytes
        return found

    def by_part(self, role: Role) -> dict[str, int]:
        """Return the bytes of one role at the moment of the peak, by the part of the model that made them."""
        found: dict[str, int] = {}
        for block in self._at_peak:
            if block.role == role:
                found[block.part] = found.get(block.part, 0) + block.nbytes
        return found

    def forget_peak(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.live
        self._at_peak = list(self._blocks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.scalar is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.scalar
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name not in self.hidden and _takes_workspace(name, result):
            self.hidden.add(name)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, None)
        if self.live > self.peak:
            self.peak = self.live
            self._at_peak = list(self._blocks.values())
        return result

    def _count(self, tensor: Tensor, role: Role | None) -> None:
        if self._device is not None and tensor.device != self._device:
            return
        try:
            storage = local(tensor).untyped_storage()
        except NotImplementedError:  # sparse and the like have none of their own
            return
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(
                round_up(storage.nbytes(), self._grain), role or "temporaries", self.part
            )
            self.live += block.nbytes
            weakref.finalize(storage, self._forget, key)
        elif role is not None:
            block.role = role

    def _forget(self, key: int) -> None:
        self.live -= self._blocks.pop(key).nbytes


def _takes_workspace(name: str, result: Any) -> bool:
    """Return whether an operation is known to need memory beyond its result.

    Convolutions and recurrent layers bring data into an order of the library's own; so do products of matrices in half
    precision on the CPU.
    """
    if any(word in name for word in _WITH_WORKSPACE):
        return True
    is_product = any(word in name for word in ("::mm", "::addmm", "::bmm", "::baddbmm"))
    return is_product and result.device.type == "cpu" and result.dtype in (torch.bfloat16, torch.float16)


def _key(tensor: Tensor) -> int:
    try:
        return storage_key(tensor)
    except NotImplementedError:
        return 0
