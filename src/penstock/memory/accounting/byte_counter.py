"""ByteCounter: counts the bytes that tensors hold, by role, while a program runs on real or fake tensors.

Every storage that an operation makes is counted from then until its finalizer runs, with its size as it is changed
(FSDP2 frees and allocates gathered layers so). Operations of tensors that consist of others (DTensor) are counted as
what they do with those. What happens inside an operation is not seen: the workspace of a fused kernel is invisible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.core.units import round_up
from penstock.distributed.rank_group import local_tensor
from penstock.memory.model_tensors import storage_key

SumBuffer = Callable[[int, int, int], int]
_BUFFER = -1
"""The key of the block that stands for the buffer of a sum."""

Role = Literal["weights", "gradients", "optimizer", "activations", "temporaries", "inputs", "communication"]
ROLES: tuple[Role, ...] = (
    *("weights", "gradients", "optimizer", "activations", "temporaries", "inputs", "communication"),
)

ALLOCATOR_GRAIN_NBYTES = 512
"""The least that an allocation takes from CUDA's caching allocator."""

_COMMUNICATES = ("c10d::", "fsdp::")
"""Operations whose tensors are buffers of communication. (Functional collectives give activations.)"""

_OF_ONE_TYPE = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_WITH_WORKSPACE = ("convolution", "lstm", "gru", "rnn", "cudnn", "miopen")


@dataclass(slots=True, eq=False)
class _Block:
    nbytes: int
    role: Role
    module: str


class ByteCounter(TorchDispatchMode):
    """Counts while it is on.

    Args:
        grain_nbytes: the least that an allocation takes.
        item_value: what `.item()` returns, where tensors are fake and hold no number.
        device: whose memory is counted; every device's by default.
        runs_on_cpu: whether what runs on the CPU here will run there; products in half precision take copies then.
        sum_buffer: what a sum over the rows of a matrix takes meanwhile, of rows, columns and the bytes of a sum.
    """

    def __init__(
        self,
        *,
        grain_nbytes: int = 1,
        item_value: float | None = None,
        device: torch.device | None = None,
        runs_on_cpu: bool = True,
        sum_buffer: SumBuffer | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.bound = 0
        """The peak, with an allowance for workspaces that are not counted."""
        self.workspace_bound = 0
        """That of the last operation."""
        self.workspace_ops: set[str] = set()
        """Operations that ran and take a workspace, which is not counted."""
        self.multiplies = False
        """Whether matrices were multiplied."""
        self.item_value = item_value
        self.module = ""
        """The child of the model that is running, to which new storages are attributed."""
        self._device = device
        self._runs_on_cpu = runs_on_cpu
        self._sum_buffer = sum_buffer
        self._has_buffer = False
        self._grain_nbytes = grain_nbytes
        self._blocks: dict[int, _Block] = {}
        self._at_peak: list[_Block] = []
        self._resize: list[Any] = []

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_
        self._resize.append(resize)

        def resized(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._count_resized(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._drop_buffer()
        torch.UntypedStorage.resize_ = self._resize.pop()  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch would import its compiler for the first operation, which takes seconds

    def watch(self, tensors: Iterable[Tensor | None], role: Role) -> None:
        """Count these tensors, under `role` from now on."""
        for tensor in tensors:
            if tensor is not None:
                self._count(tensor, role)

    def label_saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context in which what autograd saves is counted as activations."""

        def saved(tensor: Tensor) -> Tensor:
            block = self._blocks.get(_key(tensor))
            if block is not None and block.role == "temporaries":
                block.role = "activations"
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor)

    def label_kept(self) -> None:
        """Count temporaries that still live as activations."""
        for block in self._blocks.values():
            block.role = "activations" if block.role == "temporaries" else block.role

    def by_role(self) -> dict[Role, int]:
        """Return the bytes by role at the moment of the peak."""
        found: dict[Role, int] = dict.fromkeys(ROLES, 0)
        for block in self._at_peak:
            found[block.role] += block.nbytes
        return found

    def by_module(self, role: Role) -> dict[str, int]:
        """Return the bytes of one role at the moment of the peak, by the child of the model that made them."""
        found: dict[str, int] = {}
        for block in self._at_peak:
            if block.role == role:
                found[block.module] = found.get(block.module, 0) + block.nbytes
        return found

    def reset_peak(self) -> None:
        """Set the peak to the current bytes."""
        self.peak = self.bound = self.live
        self._at_peak = list(self._blocks.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.item_value is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.item_value
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it is called again with the tensors that such a one consists of
        name = func.name()
        self._drop_buffer()
        if name in _OF_ONE_TYPE:
            _reject_mixed_types(name, args)
        result = func(*args, **(kwargs or {}))
        if name == "_c10d_functional::wait_tensor":
            return args[0]  # a fake one makes a copy, which the real one does not
        self.multiplies = self.multiplies or _is_product(name)
        self.workspace_bound = 0
        if _takes_workspace(name, result, products=self._runs_on_cpu):
            self.workspace_ops.add(name)
            self.workspace_bound = _workspace_allowance(name, args, kwargs, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, None)
        if name.startswith(_COMMUNICATES):
            self._label_communication([args, kwargs, result])
        if self._sum_buffer is not None and name == "aten::sum.dim_IntList":
            self._count_buffer(self._sum_buffer, args[0], args[1])
        self.bound = max(self.bound, self.live + self.workspace_bound)
        if self.live > self.peak:
            self.peak = self.live
            self._at_peak = list(self._blocks.values())
        return result

    def _count_buffer(self, sum_buffer: SumBuffer, summed: Tensor, dims: list[int] | None) -> None:
        """Count the buffer of a sum, until the next operation."""
        if summed.ndim != 2 or dims != [0] or not summed.is_contiguous() or not summed.is_floating_point():
            return
        rows, columns = summed.shape
        nbytes = sum_buffer(rows, columns, max(4, summed.itemsize))
        if nbytes:
            self._has_buffer = True
            self._add(_BUFFER, nbytes, "temporaries")

    def _drop_buffer(self) -> None:
        if self._has_buffer:
            self._has_buffer = False
            self._forget(_BUFFER)

    def _label_communication(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            block = self._blocks.get(_key(leaf)) if isinstance(leaf, Tensor) else None
            if block is not None and block.role == "temporaries":
                block.role = "communication"

    def _count(self, tensor: Tensor, role: Role | None) -> None:
        if self._device is not None and tensor.device != self._device:
            return
        try:
            storage = local_tensor(tensor).untyped_storage()
        except NotImplementedError:  # sparse tensors have none
            return
        block = self._blocks.get(storage._cdata)
        if block is None:
            self._add(storage._cdata, storage.nbytes(), role or "temporaries")
            weakref.finalize(storage, self._forget, storage._cdata)
        elif role is not None:
            block.role = role

    def _count_resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as freed and made anew, so that what was held before keeps its size in the past."""
        old = self._blocks.get(storage._cdata)
        if old is not None:
            self._forget(storage._cdata)
        elif self._device is not None and storage.device != self._device:
            return
        else:
            weakref.finalize(storage, self._forget, storage._cdata)
        role: Role = "communication" if old is None or old.role == "temporaries" else old.role
        self._add(storage._cdata, storage.nbytes(), role)

    def _add(self, key: int, nbytes: int, role: Role) -> None:
        block = _Block(round_up(nbytes, self._grain_nbytes), role, self.module)
        self._blocks[key] = block
        self.live += block.nbytes

    def _forget(self, key: int) -> None:
        self.live -= self._blocks.pop(key).nbytes


def _takes_workspace(name: str, result: Any, *, products: bool) -> bool:
    """Return whether an operation is known to need memory beyond its result.

    Convolutions and recurrent layers copy data into the library's layout; so do `products` of matrices in half
    precision on the CPU.
    """
    if any(word in name for word in _WITH_WORKSPACE):
        return True
    half = (torch.bfloat16, torch.float16)
    return products and _is_product(name) and result.device.type == "cpu" and result.dtype in half


def _workspace_allowance(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return bytes that cover the workspaces seen on the CPU: a copy of all that is read and written in the library's
    layout, and eight of a convolution's weight (its gradient is summed in parts), or 256 if each channel has its own.
    """
    copies = sum(one.nbytes for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor))
    if name == "aten::convolution":
        return copies + 8 * int(args[1].nbytes)
    if name != "aten::convolution_backward":
        return copies
    weight = args[2]
    is_depthwise = weight.shape[1] == 1 and weight.device.type == "cpu"
    return copies + (256 if is_depthwise else 8) * int(weight.nbytes)


def _is_product(name: str) -> bool:
    return any(word in name for word in ("::mm", "::addmm", "::bmm", "::baddbmm"))


def _reject_mixed_types(name: str, args: Any) -> None:
    """Raise what real tensors would: fake ones are multiplied whatever their types are."""
    types = {one.dtype for one in args if isinstance(one, Tensor)}
    if len(types) > 1:
        raise RuntimeError(f"{name} of {' and '.join(sorted(map(str, types)))}")


def _key(tensor: Tensor) -> int:
    try:
        return storage_key(tensor)
    except NotImplementedError:
        return 0
