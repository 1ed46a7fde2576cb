"""What fits: the peak of a training step, by role, predicted on fake tensors for every way to run it.

The step is run on fake tensors, which have sizes and hold no bytes, on the fake CPU: no GPU is needed and no
memory is taken. Each way is a micro-batch, with or without checkpointed blocks, with or without their inputs offloaded.
A first, small step makes the optimizer's state. Models that decide by the values of tensors cannot be run that way:
they are measured, on real tensors, and the operator that asked is named.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from penstock.core.errors import OptionError
from penstock.core.tree import map_leaves
from penstock.core.units import parse_size, size_text
from penstock.device.accelerator import free_and_total_nbytes
from penstock.memory.blocks import blocks_of, checkpoint_blocks
from penstock.memory.counting import Counting, Role
from penstock.memory.microbatch import Split, split_batch
from penstock.memory.microbatch import batch_size as size_of

LossFunction = Callable[[nn.Module, Any], tuple[Tensor, Any]]

Mode = Literal["plain", "checkpointed", "offloaded"]
MODES: tuple[Mode, ...] = ("plain", "checkpointed", "offloaded")

ERROR = 0.03
"""How far a prediction may be off."""

_CUDA_GRAIN = 512
_FLOPS_PER_S = 100e12
_LINK_BYTES_PER_S = 25e9
_PART_COST = 0.01
"""The share of a step that cutting the batch once more is taken to cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a step, and what it takes."""

    micro_batch: int
    """Samples at once."""

    parts: int
    """Micro-batches per step."""

    checkpoint: bool
    """Whether the blocks are checkpointed."""

    offload: bool
    """Whether the inputs of the blocks wait in host memory."""

    peak_nbytes: int
    """The most device memory that the step holds."""

    by_role: dict[Role, int]
    """What it consists of at that moment."""

    extra_flops: float
    """Operations computed again, as a share of those of a plain step."""

    moved_nbytes: int
    """Bytes that go to the host and back."""

    slow_down: float
    """Estimated: time per step over that of a plain step. Not measured; see `plan`."""

    def settings(self) -> str:
        """Return the way in words."""
        more = [word for word, is_on in (("checkpointed", self.checkpoint), ("offloaded", self.offload)) if is_on]
        parts = f" x {self.parts}" if self.parts > 1 else ""
        return ", ".join([f"{self.micro_batch}{parts}", *more])


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The ways to run a step under a budget, and the one to choose."""

    budget_nbytes: int
    """What there is."""

    ways: tuple[Way, ...]
    """All that were looked at, the fastest first."""

    choice: Way | None
    """The fastest that fits, its error bar included; None when none does."""

    error: float
    """How far the peaks may be off, as a share."""

    measured: str = ""
    """Why tensors were real and not fake, if they were."""

    warnings: tuple[str, ...] = field(default=())
    """What the figures do not see."""

    def apply(self, model: nn.Module) -> int:
        """Make `model` run as chosen, and return the micro-batch for `TrainStep(micro_batch=)`.

        Raises:
            OptionError: nothing fits.
        """
        if self.choice is None:
            raise OptionError(f"no way to run this step fits {size_text(self.budget_nbytes)}; {self._least_words()}")
        if self.choice.checkpoint:
            checkpoint_blocks(model, offload=self.choice.offload)
        return self.choice.micro_batch

    def render(self) -> str:
        """Return the plan as text."""
        head = f"{'micro-batch':36} {'peak':>10}  {'weights':>9} {'gradients':>9} {'optimizer':>9} {'activations':>11}"
        lines = [head + f" {'other':>9} {'slower':>7}"]
        for way in self.ways:
            roles = way.by_role
            other = roles["temporaries"] + roles["inputs"]
            cells = f"{size_text(roles['weights']):>9} {size_text(roles['gradients']):>9} "
            cells += f"{size_text(roles['optimizer']):>9} {size_text(roles['activations']):>11} {size_text(other):>9}"
            fits = "" if self.fits(way) else "  does not fit"
            mark = ">" if way is self.choice else " "
            lines.append(
                f"{mark} {way.settings():34} {size_text(way.peak_nbytes):>10}  {cells} {way.slow_down:>6.2f}x{fits}"
            )
        how = "measured on real tensors" if self.measured else "predicted"
        lines.append(
            f"budget {size_text(self.budget_nbytes)}; peaks {how}, to {self.error:.0%}; slow-downs are estimates"
        )
        lines += [f"note: {words}" for words in (*((self.measured,) if self.measured else ()), *self.warnings)]
        lines.append(self._least_words() if self.choice is None else f"choose {self.choice.settings()}")
        return "\n".join(lines) + "\n"

    def fits(self, way: Way) -> bool:
        """Return whether `way` fits the budget, its error bar included."""
        return way.peak_nbytes * (1 + self.error) <= self.budget_nbytes

    def to_json(self) -> dict[str, Any]:
        """Return it as data."""
        return asdict(self)

    def _least_words(self) -> str:
        least = min(self.ways, key=lambda way: way.peak_nbytes)
        needed = int(least.peak_nbytes * (1 + self.error))
        return f"nothing fits: the least is {size_text(needed)}, with {least.settings()}"


def plan(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Optimizer | None = None,
    *,
    budget: str | int | None = None,
    split: Split = split_batch,
    modes: Sequence[Mode] = MODES,
) -> Plan:
    """Predict the peak memory of a training step for each way to run it, and choose one.

    Nothing of `model` and `optimizer` is changed, and no memory of the device is used. The slow-down of a way is
    estimated: operations computed again count as such, bytes moved to the host at 25 GB/s against 100 TFLOP/s of
    computing, and each further micro-batch as 1 % of the step.

    Args:
        model: on whatever device.
        loss_fn: `(model, batch) -> (loss_sum, weight)`, as for `TrainStep`.
        batch: a whole one, of real tensors; only their shapes matter.
        optimizer: the model's; None for none.
        budget: as in "70GiB", or bytes; what the accelerator has free, by default.
        split: `(batch, parts) -> batches`, for batches that `split_batch` cannot cut.
        modes: which of "plain", "checkpointed" and "offloaded" to look at.

    Raises:
        OptionError: the budget names no size, or there is none and no accelerator.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> def loss_fn(model, x):
        ...     return model(x).square().sum(), len(x)
        >>> found = plan(model, loss_fn, torch.zeros(1024, 64), budget="500KiB")
        >>> found.choice.micro_batch
        256
    """
    limit = _budget(budget)
    on_device = any(p.device.type not in ("cpu", "meta") for p in model.parameters())
    rehearsal = _Rehearsal(model, loss_fn, batch, optimizer, split, modes, grain=_CUDA_GRAIN if on_device else 1)
    measured = ""
    try:
        ways = rehearsal.ways(fake=True)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        measured = f"{error.func} depends on the values of tensors, so the step was measured instead"
        ways = rehearsal.ways(fake=False)
    ways.sort(key=lambda way: (way.slow_down, way.peak_nbytes))
    hidden = sorted(rehearsal.hidden)
    found = Plan(
        budget_nbytes=limit,
        ways=tuple(ways),
        choice=None,
        error=ERROR,
        measured=measured,
        warnings=(f"the workspace of {', '.join(hidden)} is not seen: the peak may be higher",) if hidden else (),
    )
    return replace(found, choice=next((way for way in ways if found.fits(way)), None))


class _Rehearsal:
    """Runs steps of a copy of the model, and looks at what they hold."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        optimizer: Optimizer | None,
        split: Split,
        modes: Sequence[Mode],
        *,
        grain: int,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._optimizer = optimizer
        self._split = split
        self._modes = modes
        self._grain = grain
        self.hidden: set[str] = set()

    def ways(self, *, fake: bool) -> list[Way]:
        """Return all ways, from the whole batch down to one sample at a time, checkpointed or not."""
        size = size_of(self._batch)
        parts = [1]
        while parts[-1] < size:
            parts.append(min(size, 2 * parts[-1]))
        with self._copied(fake=fake) as (model, optimizer, batch):
            self._step(model, optimizer, batch, size, fake=fake)  # makes the optimizer's state
            plain, inside = self._flops(model, batch)
            found: list[Way] = []
            if "plain" in self._modes:
                found += [self._way(model, optimizer, batch, count, (plain, 0), None, fake=fake) for count in parts]
            if blocks_of(model):
                for host in [None] * ("checkpointed" in self._modes) + [_Host()] * ("offloaded" in self._modes):
                    checkpoint_blocks(model, offload=host is not None, saving=None if host is None else host.saving)
                    for count in parts:
                        way = self._way(model, optimizer, batch, count, (plain, inside), host, fake=fake)
                        found.append(replace(way, checkpoint=True, offload=host is not None))
        return found

    def _way(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        parts: int,
        flops: tuple[int, int],
        host: _Host | None,
        *,
        fake: bool,
    ) -> Way:
        """Run a step in so many parts; `flops` are those of a plain step, and those that are done twice."""
        if host is not None:
            host.nbytes = 0
        counting = self._step(model, optimizer, batch, parts, fake=fake)
        plain, twice = flops
        extra = twice / plain if plain else 0.0
        moved = 0 if host is None else 2 * host.nbytes * parts // min(parts, 2)  # there and back
        transfer = moved / _LINK_BYTES_PER_S / (plain / _FLOPS_PER_S) if plain else 0.0
        return Way(
            micro_batch=-(-size_of(batch) // parts),
            parts=parts,
            checkpoint=False,
            offload=False,
            peak_nbytes=counting.peak,
            by_role=counting.by_role(),
            extra_flops=extra,
            moved_nbytes=moved,
            slow_down=1 + extra + transfer + _PART_COST * (parts - 1),
        )

    def _step(self, model: nn.Module, optimizer: Optimizer | None, batch: Any, parts: int, *, fake: bool) -> Counting:
        """Take a step, of two micro-batches at most: later ones are like the second."""
        counting = Counting(grain=self._grain)
        counting.watch([*model.parameters(), *model.buffers()], "weights")
        counting.watch((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), "inputs")
        counting.watch(_state_tensors(optimizer), "optimizer")
        params = [param for param in model.parameters() if param.requires_grad]
        for param in model.parameters():
            param.grad = None
        counting.forget_peak()
        hooks = [
            param.register_post_accumulate_grad_hook(lambda p: counting.watch([p.grad], "gradients"))
            for param in params
        ]
        for part in list(self._split(batch, parts))[:2]:
            with counting, counting.watch_saved():
                loss = self._loss_fn(model, part)[0]
            with counting:
                loss.backward()
            del loss
        for hook in hooks:
            hook.remove()
        if optimizer is not None:
            counting.scalar = 0.5 if fake else None  # optimizers read their step counters
            with counting:
                optimizer.step()
            counting.watch(_state_tensors(optimizer), "optimizer")
        self.hidden |= counting.hidden
        return counting

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


def _state_tensors(optimizer: Optimizer | None) -> Iterator[Tensor]:
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, Tensor))


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
    return leaf.to("cpu") if isinstance(leaf, Tensor) else leaf


def _budget(wanted: str | int | None) -> int:
    if wanted is None:
        if not torch.accelerator.is_available():
            raise OptionError("there is no accelerator whose memory could be the budget; say one, as in budget='24GiB'")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return free_and_total_nbytes(torch.device(accelerator.type, torch.accelerator.current_device_index()))[0]
    try:
        return parse_size(wanted)
    except ValueError as error:
        raise OptionError(str(error)) from error
