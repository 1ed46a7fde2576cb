"""What fits: the peak of a training step, by role, predicted on fake tensors for every way to run it.

The step is run on fake tensors, which have sizes and hold no bytes, on the fake CPU: no GPU is needed and no
memory is taken. Each way is a micro-batch, with or without checkpointed blocks, with or without their inputs offloaded.
A first, small step makes the optimizer's state. Models that decide by the values of tensors cannot be run that way, nor
those with operators that know nothing of fake tensors: they are measured, on real ones, and the operator is named.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from penstock.core.errors import OptionError
from penstock.core.tree import map_leaves
from penstock.core.units import parse_size
from penstock.device.accelerator import free_and_total_nbytes
from penstock.memory import microbatch
from penstock.memory.blocks import blocks_of, checkpoint_blocks
from penstock.memory.counting import ALLOCATOR_GRAIN, Counting, Role
from penstock.memory.holdings import LossFunction, state_tensors, storage_key
from penstock.memory.microbatch import Split, arrays_of, split_batch
from penstock.memory.transaction import refuse_closure
from penstock.memory.verify import verified
from penstock.memory.ways import Plan, Way

Mode = Literal["plain", "checkpointed", "offloaded", "state offloaded"]
MODES: tuple[Mode, ...] = ("plain", "checkpointed", "offloaded", "state offloaded")

ERROR = 0.03
"""How far a prediction may be off."""

_FLOPS_PER_S = 100e12
_LINK_BYTES_PER_S = 25e9
_PART_COST = 0.01
"""The share of a step that cutting the batch once more is taken to cost."""


def plan(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    budget: str | float | None = None,
    split: Split = split_batch,
    batch_size: Callable[[Any], int] = microbatch.batch_size,
    modes: Sequence[Mode] = MODES,
    verify: bool = True,
) -> Plan:
    """Predict the peak memory of a training step for each way to run it, and choose one.

    Nothing of `model` and `optimizer` is changed, and no memory of the device is used. Only where the model lies on an
    accelerator, forward and backward of the choice are run there once, measured and undone, and the plan is corrected
    by that. The slow-down of a way is estimated: operations computed again count as such, bytes moved to the host at
    25 GB/s against 100 TFLOP/s of computing, and each further micro-batch as 1 % of the step.

    Args:
        model: on whatever device.
        loss_fn: `(model, batch) -> (loss_sum, weight)`, as for `TrainStep`.
        batch: a whole one, of real tensors; only their shapes matter.
        optimizer: the model's; None for none.
        budget: as in "70GiB", or bytes; what the accelerator has free, by default.
        split: `(batch, parts) -> batches`, for batches that `split_batch` cannot cut.
        batch_size: `batch -> samples`, likewise.
        modes: which of "plain", "checkpointed", "offloaded" and "state offloaded" to look at. Where the model does not
            run with checkpointed blocks, a warning says so.
        verify: whether to run the choice, where the model lies on an accelerator.

    Raises:
        OptionError: the budget names no size, or there is none and no accelerator; or the optimizer needs a closure.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> def loss_fn(model, x):
        ...     return model(x).square().sum(), len(x)
        >>> found = plan(model, loss_fn, torch.zeros(1024, 64), budget="500KiB")
        >>> found.choice.micro_batch
        256
    """
    refuse_closure(optimizer)
    limit = _budget(budget)
    on_device = any(p.device.type not in ("cpu", "meta") for p in model.parameters())
    grain = ALLOCATOR_GRAIN if on_device else 1
    rehearsal = _Rehearsal(model, loss_fn, batch, optimizer, split, batch_size, modes, grain=grain)
    measured = ""
    try:
        ways = rehearsal.ways(fake=True)
    except OptionError:
        raise
    except Exception as error:  # noqa: BLE001  the user's code on fake tensors; on real ones its own errors are raised
        measured = _why_measured(error)
        ways = rehearsal.ways(fake=False)
    empty = Plan(
        budget_nbytes=limit,
        ways=(),
        choice=None,
        error=ERROR,
        measured=measured,
        warnings=tuple(rehearsal.warnings()),
    )
    found = empty.chosen(tuple(ways))
    return verified(found, model, loss_fn, batch, split) if on_device and verify else found


def _why_measured(error: Exception) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} depends on the values of tensors, so the step was measured instead"
    return f"the step does not run without values ({_words(error)}), so it was measured instead"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taken:
    """What a rehearsed step held, in bytes."""

    held: int
    """All the time."""

    state: int
    """Of that, the optimizer's state."""

    gather: int
    """At most, until the gradients were there."""

    step: int
    """At most, while the optimizer stepped."""

    gather_roles: dict[Role, int]
    step_roles: dict[Role, int]

    def peak(self, *, offload_state: bool) -> tuple[int, dict[Role, int]]:
        """Return the most that is held, and what it consists of."""
        away = self.state if offload_state else 0
        if self.step > self.gather - away:
            return self.step, self.step_roles
        return self.gather - away, {**self.gather_roles, "optimizer": self.gather_roles["optimizer"] - away}


class _Rehearsal:
    """Runs steps of a copy of the model, and looks at what they hold."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: Optimizer | None,
        split: Split,
        batch_size: Callable[[Any], int],
        modes: Sequence[Mode],
        *,
        grain: int,
    ) -> None:
        self._is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._loss_fn = loss_fn
        self._batch = batch
        self._optimizer = optimizer
        self._split = split
        self._batch_size = batch_size
        self._modes = modes
        self._grain = grain
        self._hidden: set[str] = set()
        self._unrunnable: dict[str, Exception] = {}

    def warnings(self) -> Iterator[str]:
        """Yield what the ways do not show."""
        if self._hidden:
            yield f"the workspace of {', '.join(sorted(self._hidden))} is not seen: the peak may be higher"
        if self._is_compiled:
            yield "the model is compiled, and was planned as if it were not: fused operations save less"
        for mode, error in self._unrunnable.items():
            yield f"the model does not run with its blocks {mode}, maybe for a cache (use_cache): {_words(error)}"

    def ways(self, *, fake: bool) -> list[Way]:
        """Return all ways, from the whole batch down to one sample at a time, checkpointed or not."""
        size = self._batch_size(self._batch)
        parts = [1]
        while parts[-1] < size:
            parts.append(min(size, 2 * parts[-1]))
        # A compiled model would be compiled for every size; and what compiles is not imported for others.
        eager = torch.compiler.set_stance("force_eager") if self._is_compiled else contextlib.nullcontext()
        with eager, self._copied(fake=fake) as (model, optimizer, batch):
            try:
                self._step(model, optimizer, batch, parts[-1], fake=fake)  # makes the optimizer's state
            except ValueError:  # what BatchNorm raises for a single sample
                if len(parts) == 1:
                    raise
                parts.pop()
                self._step(model, optimizer, batch, parts[-1], fake=fake)
            plain, inside = self._flops(model, batch)
            found: list[Way] = []
            if "plain" in self._modes:
                for count in parts:
                    found += self._ways(model, optimizer, batch, count, (plain, 0), None, fake=fake)
            if blocks_of(model):
                for host in [None] * ("checkpointed" in self._modes) + [_Host()] * ("offloaded" in self._modes):
                    checkpoint_blocks(model, offload=host is not None, saving=None if host is None else host.saving)
                    ways: list[Way] = []
                    try:
                        for count in parts:
                            ways += self._ways(model, optimizer, batch, count, (plain, inside), host, fake=fake)
                    except Exception as error:
                        if not found:
                            raise
                        self._unrunnable["checkpointed" if host is None else "offloaded"] = error
                        continue
                    found += [replace(way, checkpoint=True, offload=host is not None) for way in ways]
        return found

    def _ways(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        parts: int,
        flops: tuple[int, int],
        host: _Host | None,
        *,
        fake: bool,
    ) -> Iterator[Way]:
        """Run a step in so many parts; `flops` are those of a plain step, and those that are done twice."""
        if host is not None:
            host.nbytes = 0
        taken = self._step(model, optimizer, batch, parts, fake=fake)
        plain, twice = flops
        extra = twice / plain if plain else 0.0
        inputs = 0 if host is None else 2 * host.nbytes * parts // min(parts, 2)  # there and back
        for offload_state in [False] + [True] * ("state offloaded" in self._modes and taken.state > 0):
            moved = inputs + 2 * taken.state * offload_state
            transfer = moved / _LINK_BYTES_PER_S / (plain / _FLOPS_PER_S) if plain else 0.0
            peak, roles = taken.peak(offload_state=offload_state)
            away = taken.state if offload_state else 0
            yield Way(
                micro_batch=-(-self._batch_size(batch) // parts),
                parts=parts,
                checkpoint=False,
                offload=False,
                offload_state=offload_state,
                peak_nbytes=peak,
                by_role=roles,
                held_nbytes=taken.held - away,
                gather_nbytes=taken.gather - away,
                extra_flops=extra,
                moved_nbytes=moved,
                slow_down=1 + extra + transfer + _PART_COST * (parts - 1),
            )

    def _step(self, model: nn.Module, optimizer: Optimizer | None, batch: Any, parts: int, *, fake: bool) -> _Taken:
        """Take a step, of two micro-batches at most: later ones are like the second."""
        counting = Counting(grain=self._grain)
        counting.watch([*model.parameters(), *model.buffers()], "weights")
        counting.watch((leaf for leaf in arrays_of(batch) if isinstance(leaf, Tensor)), "inputs")
        counting.watch(state_tensors(optimizer), "optimizer")
        params = [param for param in model.parameters() if param.requires_grad]
        for param in model.parameters():
            param.grad = None
        counting.forget_peak()
        held = counting.live
        hooks = [
            param.register_post_accumulate_grad_hook(lambda p: counting.watch([p.grad], "gradients"))
            for param in params
        ]
        try:
            for part in list(self._split(batch, parts) if parts > 1 else [batch])[:2]:
                with counting, counting.watch_saved():
                    loss = self._loss_fn(model, part)[0]
                with counting:
                    loss.backward()
                del loss
        finally:
            for hook in hooks:
                hook.remove()
        gather, gather_roles = counting.peak, counting.by_role()
        counting.forget_peak()
        if optimizer is not None:
            counting.scalar = 0.5 if fake else None  # optimizers read their step counters
            with counting:
                optimizer.step()
            counting.watch(state_tensors(optimizer), "optimizer")
        self._hidden |= counting.hidden
        state = {storage_key(one): one.nbytes for one in state_tensors(optimizer) if one.ndim and not one.is_sparse}
        return _Taken(
            held=held,
            state=sum(state.values()),
            gather=gather,
            step=counting.peak,
            gather_roles=gather_roles,
            step_roles=counting.by_role(),
        )

    def _flops(self, model: nn.Module, batch: Any) -> tuple[int, int]:
        """Return the operations of a plain step, and of those the ones in blocks' forward."""
        names = {name for name, _ in blocks_of(model)}
        with FlopCounterMode(display=False) as counter:
            loss = self._loss_fn(model, batch)[0]
        forward = counter.get_total_flops()
        inside = sum(
            sum(counts.values())
            for module, counts in counter.get_flop_counts().items()
            if module.partition(".")[2] in names
        )
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return forward + counter.get_total_flops(), inside

    @contextlib.contextmanager
    def _copied(self, *, fake: bool) -> Iterator[tuple[nn.Module, Optimizer | None, Any]]:
        """Yield copies of model, optimizer and batch: fake ones on the CPU, or real ones where they are."""
        model, optimizer, batch = self._model, self._optimizer, self._batch
        if not fake:
            model, optimizer, batch = copy.deepcopy((model, optimizer, batch))
            with torch.random.fork_rng(enabled=True):
                yield model, optimizer, batch
            return
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(mode):
            model, optimizer, batch = copy.deepcopy((model, optimizer, batch))
        with mode, torch.random.fork_rng(devices=()):
            _as_on_its_device(optimizer)
            _move_to_fake_cpu(model, optimizer)
            yield model, optimizer, map_leaves(_on_cpu, batch)


class _Host:
    """What torch's `save_on_cpu` does, with a host whose memory is not the device's."""

    def __init__(self) -> None:
        self.nbytes = 0

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context."""

        def pack(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
            self.nbytes += tensor.nbytes
            return tensor.shape, tensor.dtype, tensor.device

        def unpack(packed: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
            size, dtype, device = packed
            return torch.zeros(size, dtype=dtype, device=device)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _as_on_its_device(optimizer: Optimizer | None) -> None:
    """Take the implementation that the optimizer would take on an accelerator, if its parameters are there."""
    for group in optimizer.param_groups if optimizer is not None else ():
        on_device = any(p.device.type not in ("cpu", "meta") for p in group["params"])
        if on_device and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


def _move_to_fake_cpu(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Replace fake tensors of other devices: autograd on them needs the device's own build of torch."""
    replaced: dict[int, Tensor] = {}

    def moved(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in replaced:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_param = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
        return replaced[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: moved(tensor) for name, tensor in held.items()})
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [moved(param) for param in group["params"]]
        states = {moved(p): {k: moved(v) for k, v in state.items()} for p, state in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(states)


def _on_cpu(leaf: Any) -> Any:
    if callable(getattr(leaf, "to", None)):
        return leaf.to("cpu")
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = [field.name for field in dataclasses.fields(leaf) if field.init]
        return replace(leaf, **{name: map_leaves(_on_cpu, getattr(leaf, name)) for name in fields})
    return leaf


def _budget(wanted: str | float | None) -> int:
    if wanted is None:
        if not torch.accelerator.is_available():
            raise OptionError("there is no accelerator whose memory could be the budget; say one, as in budget='24GiB'")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return free_and_total_nbytes(torch.device(accelerator.type, torch.accelerator.current_device_index()))[0]
    try:
        found = parse_size(int(wanted) if isinstance(wanted, float) else wanted)
    except ValueError as error:
        raise OptionError(str(error)) from error
    if found <= 0:
        raise OptionError(f"the budget must be more than {wanted!r}; say it as in budget='24GiB'")
    return found
