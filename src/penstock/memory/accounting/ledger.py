"""ledger: which bytes are held by role and by module, on each device and on the host.

On an accelerator the figures add up to the allocator's total. Allocated bytes that no tensor here accounts for are what
autograd saved and what other libraries hold. Reserved bytes that are not allocated are cached. Bytes of the device
beyond that belong to the driver's context and to other processes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.core.host import resident_nbytes, total_nbytes
from penstock.core.units import size_text
from penstock.device.accelerator import free_and_total_nbytes
from penstock.distributed.rank_group import local_tensor
from penstock.memory.accounting.byte_counter import ALLOCATOR_GRAIN_NBYTES, ByteCounter, Role
from penstock.memory.model_tensors import state_tensors, storage_key

_ITSELF = "(itself)"
_NO_ACCELERATORS = ("cpu", "meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleBytes:
    """What one child of a model holds."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What it had saved for backward, at the peak of `during`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBytes:
    """What is held on one device, or on the host."""

    device: str

    weights: int
    """Parameters and buffers of the model."""

    gradients: int
    optimizer: int
    """The optimizer's state."""

    others: int
    """Other tensors that Python refers to."""

    loader: int = 0
    """Batches of the loader's, copied ahead (device) or in its slots (host)."""

    unseen: int = 0
    """Allocated beyond all that: what autograd saved, other libraries."""

    cached: int = 0
    """Reserved by the allocator and not allocated; what of it lies in pieces is fragmentation."""

    outside: int = 0
    """Taken on the device outside this allocator: by the driver's context, and by other processes."""

    allocated: int = 0
    """The allocator's own count; on the host, the process's resident set."""

    peak: int = 0
    """The most bytes that were ever allocated."""

    total: int = 0
    """The memory of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Which bytes are held, at one moment."""

    devices: tuple[DeviceBytes, ...]
    """The host last."""

    modules: dict[str, ModuleBytes]
    """By the model's children."""

    at_peak: dict[Role, int] = field(default_factory=dict)
    """What the model's device held at the peak of `during`, by role; empty without it."""

    def on(self, device: str) -> DeviceBytes:
        """Return the account of one device, as in "cuda:0", or "cpu" for the host."""
        return next(account for account in self.devices if account.device == device)

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as data."""
        return asdict(self)

    def __str__(self) -> str:
        return self.render().rstrip()

    def render(self) -> str:
        """Return the ledger as text."""
        lines = []
        for account in self.devices:
            roles = {name: value for name, value in asdict(account).items() if isinstance(value, int) and value}
            totals = {name: roles.pop(name) for name in ("allocated", "peak", "total") if name in roles}
            lines.append(f"{account.device}: " + ", ".join(f"{name} {size_text(n)}" for name, n in totals.items()))
            lines += [f"  {name.replace('_', ' '):16} {size_text(value):>10}" for name, value in roles.items()]
        if self.at_peak:
            lines.append(f"at the peak of the step, {size_text(sum(self.at_peak.values()))} in all")
            lines += [f"  {role:16} {size_text(nbytes):>10}" for role, nbytes in self.at_peak.items() if nbytes]
        lines.append("by module")
        for name, held in self.modules.items():
            parts = ", ".join(f"{role} {size_text(value)}" for role, value in asdict(held).items() if value)
            lines += [f"  {name:24} {parts}"] if parts else []
        return "\n".join(lines) + "\n"


def ledger(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    *,
    during: Callable[[], object] | None = None,
) -> Ledger:
    """Return which bytes are held now, and at the peak of a step.

    Args:
        model: whose parameters, gradients and buffers are counted, in all and by child.
        optimizer: whose state is counted.
        loader: a `penstock.DataLoader`, whose slots and pending copies are counted.
        during: a training step, as in `lambda: step(batch)`. It runs once, and every tensor that an operation
            returns is counted; what a fused kernel takes inside is not seen.

    Example:
        >>> model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        >>> ledger(model).on("cpu").weights, ledger(model).modules["0"].weights
        (4194304, 4194304)
    """
    peak = None if during is None else _count_step(model, optimizer, during)
    weights = list(_dense((*model.parameters(), *model.buffers())))
    gradients = list(_dense(p.grad for p in model.parameters()))
    state = list(_dense(state_tensors(optimizer)))
    known = {storage_key(tensor) for tensor in (*weights, *gradients, *state)}
    statistics = loader.statistics() if loader is not None else None
    found = [one for one in gc.get_objects() if _is_tensor(one) and storage_key(one) not in known]
    devices = sorted({t.device for t in (*weights, *gradients, *state, *found) if t.device.type != "meta"}, key=str)
    accounts = []
    for device in [*(d for d in devices if d.type != "cpu"), torch.device("cpu")]:
        held = DeviceBytes(
            device=str(device),
            weights=_nbytes(weights, device),
            gradients=_nbytes(gradients, device),
            optimizer=_nbytes(state, device),
            others=_nbytes(found, device),
            loader=0 if statistics is None else _loader_nbytes(statistics, device),
        )
        accounts.append(_with_host(held) if device.type == "cpu" else _with_allocator(held, device))
    modules = dict(_by_module(model, optimizer))
    if peak is None:
        return Ledger(devices=tuple(accounts), modules=modules)
    for child, nbytes in peak.by_module("activations").items():
        name = child or _ITSELF
        modules[name] = replace(modules.get(name, ModuleBytes()), activations=nbytes)
    return Ledger(devices=tuple(accounts), modules=modules, at_peak=peak.by_role())


def _count_step(model: nn.Module, optimizer: Optimizer | None, during: Callable[[], object]) -> ByteCounter:
    """Run the step, and count what the model's device holds."""
    params = list(model.parameters())
    device = next((param.device for param in params), torch.device("cpu"))
    counter = ByteCounter(grain_nbytes=1 if device.type == "cpu" else ALLOCATOR_GRAIN_NBYTES, device=device)
    counter.watch(params, "weights")
    counter.watch(model.buffers(), "weights")
    counter.watch(state_tensors(optimizer), "optimizer")
    counter.watch((param.grad for param in params), "gradients")
    counter.reset_peak()
    hooks = [
        param.register_post_accumulate_grad_hook(lambda p: counter.watch([p.grad], "gradients"))
        for param in params
        if param.requires_grad
    ]
    for name, part in model.named_children():
        hooks += [
            part.register_forward_pre_hook(functools.partial(_enter, counter, name)),
            part.register_forward_hook(functools.partial(_leave, counter)),
        ]
    try:
        with counter, counter.label_saved_tensors():
            during()
    finally:
        for hook in hooks:
            hook.remove()
    counter.watch(state_tensors(optimizer), "optimizer")
    return counter


def _enter(counter: ByteCounter, name: str, *_: object) -> None:
    counter.module = name


def _leave(counter: ByteCounter, *_: object) -> None:
    counter.module = ""


def _by_module(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, ModuleBytes]]:
    parts = dict(model.named_children())
    own = list(model.parameters(recurse=False))
    if own or not parts:
        yield _ITSELF, _module_bytes(own, model.buffers(recurse=False), optimizer)
    for name, part in parts.items():
        yield name, _module_bytes(list(part.parameters()), part.buffers(), optimizer)


def _module_bytes(params: list[nn.Parameter], buffers: Iterable[Tensor], optimizer: Optimizer | None) -> ModuleBytes:
    return ModuleBytes(
        weights=_nbytes(_dense((*params, *buffers))),
        gradients=_nbytes(_dense(p.grad for p in params)),
        optimizer=_nbytes(_dense(state_tensors(optimizer, params))),
    )


def held_on_accelerators(model: nn.Module, optimizer: Optimizer | None) -> ModuleBytes:
    """Return what a model and its optimizer hold on accelerators, all of them together, without activations."""
    params = list(model.parameters())
    every = ((*params, *model.buffers()), (p.grad for p in params), state_tensors(optimizer))
    weights, gradients, state = (
        _nbytes(tensor for tensor in _dense(tensors) if tensor.device.type not in _NO_ACCELERATORS) for tensors in every
    )
    return ModuleBytes(weights=weights, gradients=gradients, optimizer=state)


def _loader_nbytes(statistics: Any, device: torch.device) -> int:
    found: int = statistics.ring.nbytes if device.type == "cpu" else statistics.uploading_nbytes
    return found


def _with_host(held: DeviceBytes) -> DeviceBytes:
    return DeviceBytes(**{**asdict(held), "allocated": resident_nbytes(), "total": total_nbytes()})


def _with_allocator(held: DeviceBytes, device: torch.device) -> DeviceBytes:
    stats = torch.accelerator.memory_stats(device)
    allocated, reserved = int(stats["allocated_bytes.all.current"]), int(stats["reserved_bytes.all.current"])
    free, total = free_and_total_nbytes(device)
    seen = held.weights + held.gradients + held.optimizer + held.others
    return DeviceBytes(
        **{
            **asdict(held),
            "unseen": allocated - seen,
            "cached": reserved - allocated,
            "outside": max(0, total - free - reserved),
            "allocated": allocated,
            "peak": int(stats["allocated_bytes.all.peak"]),
            "total": total,
        }
    )


def _nbytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    storages = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if device is None or tensor.device == device
    }
    return sum(storages.values())


def _dense(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """Yield the tensors that hold the memory: of distributed ones this rank's part, of sparse ones two tensors."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif tensor.layout is torch.strided:
            yield local_tensor(tensor)


def _is_tensor(one: Any) -> bool:
    return type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided
