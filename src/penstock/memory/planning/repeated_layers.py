"""Stacks of layers that are built alike, run with fewer of them, and what follows for all of them.

Of each stack, five layers run, and then four in one stack after the other. Where a layer more adds, at each operation,
a constant number of bytes, the whole step is known without running it: the third layer and the last but one are the
ends of a straight line, so no layer between them holds more than both. (The first layer may differ, as it does where
its input needs no gradient; then so does what the second one runs into in backward.) `confirms` compares this with a
run that was really made, in each layer; a step where anything differs is run whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.memory.planning.byte_timeline import Key, Rows, Timeline, TimelineCounter

BASE_LAYERS = 5
"""As many run of each stack: three from its beginning, and two from its end."""

_LEAST_LAYERS = BASE_LAYERS + 2
_IN_SHORTER = (0, 1, 2, 2, 3)
"""Which layer of four stands for each of the five."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Successive children of one container that are built alike."""

    container: nn.Module
    first: int
    """The place of the first one among the children."""

    layers: tuple[nn.Module, ...]


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return the stacks whose layers are worth not to be run, all.

    >>> deep = nn.Sequential(nn.Linear(2, 3), *(nn.Linear(3, 3) for _ in range(20)))
    >>> [(stack.first, len(stack.layers)) for stack in stacks_of(deep)]
    [(1, 20)]
    """
    uses = Counter(id(tensor) for module in model.modules() for tensor in _own_tensors(module))
    homes = Counter(id(child) for module in model.modules() for child in module.children())
    found: list[Stack] = []
    inside: set[int] = set()
    for container in model.modules():
        if id(container) in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for stack in _alike_children(container):
            if all(_stands_alone(layer, uses, homes) for layer in stack.layers):
                found.append(stack)
                inside |= {id(module) for layer in stack.layers for module in layer.modules()}
    return _worth_it(found)


def _worth_it(stacks: list[Stack]) -> list[Stack]:
    """Return the longest stacks, as many as make the number of layers least that run for one step; none if all do."""
    ordered = sorted(stacks, key=lambda stack: -len(stack.layers))
    total = sum(len(stack.layers) for stack in ordered)

    def layers_run(count: int) -> int:
        whole = sum(len(stack.layers) for stack in ordered[count:])
        return (count + 1) * (whole + BASE_LAYERS * count) - count

    best = min(range(len(ordered) + 1), key=layers_run) if ordered else 0
    return ordered[:best] if layers_run(best) < total else []


def _alike_children(container: nn.Module) -> Iterator[Stack]:
    children = [child for _, child in container.named_children()]
    if len(children) != len(container._modules):  # one stands there twice, or there are gaps
        return
    first = 0
    for index in range(1, len(children) + 1):
        if index == len(children) or _structure(children[index]) != _structure(children[first]):
            if index - first >= _LEAST_LAYERS:
                yield Stack(container, first, tuple(children[first:index]))
            first = index


def _structure(layer: nn.Module) -> list[object]:
    """Return what two layers have in common that are built alike."""
    found: list[object] = []
    for name, module in layer.named_modules():
        found += [name, type(module), module.training]
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            traits = tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad)
            found += [key, traits]
    return found


def _stands_alone(layer: nn.Module, uses: Counter[int], homes: Counter[int]) -> bool:
    """Return whether a layer shares nothing, has no hooks, and learns."""
    modules = list(layer.modules())
    tensors = [tensor for module in modules for tensor in _own_tensors(module)]
    hooked = any(
        value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_hooks") and "state" not in name
    )
    return (
        not hooked
        and any(param.requires_grad for param in layer.parameters())
        and all(uses[id(tensor)] == 1 for tensor in tensors)
        and all(homes[id(module)] == 1 for module in modules)
    )


def _own_tensors(module: nn.Module) -> list[object]:
    return [one for one in [*module._parameters.values(), *module._buffers.values()] if one is not None]


@contextlib.contextmanager
def shortened(stacks: Sequence[Stack], lengths: Sequence[int]) -> Iterator[None]:
    """Leave only the first layers of each stack in the model, while the context is entered."""
    kept = [dict(stack.container._modules) for stack in stacks]
    try:
        for stack, length in zip(stacks, lengths, strict=True):
            gone = {id(layer) for layer in stack.layers[length:]}
            left = {name: child for name, child in stack.container._modules.items() if id(child) not in gone}
            numbered = all(name.isdigit() for name in left)
            stack.container._modules = {
                str(place) if numbered else name: child for place, (name, child) in enumerate(left.items())
            }
        yield
    finally:
        for stack, modules in reversed(list(zip(stacks, kept, strict=True))):
            stack.container._modules = modules


@contextlib.contextmanager
def marking(stacks: Sequence[Stack], counter: TimelineCounter) -> Iterator[None]:
    """Mark where the layers of these stacks begin and end, forward and backward."""
    hooks: list[RemovableHandle] = []

    def mark(event: str, number: int, position: int) -> None:
        def marked(*_: object) -> None:
            counter.mark(event, number, position)

        layer = stacks[number].layers[position]
        if event == "begin":
            hooks.append(layer.register_forward_pre_hook(marked))
        elif event == "end":
            hooks.append(layer.register_forward_hook(marked))
        else:
            hooks.append(layer.get_parameter(event).register_post_accumulate_grad_hook(marked))

    try:
        for number, stack in enumerate(stacks):
            for position, layer in enumerate(stack.layers):
                learned = [name for name, param in layer.named_parameters() if param.requires_grad]
                for event in ("begin", "end", *learned):
                    mark(event, number, position)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def extrapolated(base: Timeline, shorter: Sequence[Timeline], lengths: Sequence[int]) -> dict[Key, Rows] | None:
    """Return the rows of a step with stacks of `lengths`, or None if the runs do not grow evenly with the layers.

    The keys are those of `base`: of each stack, the positions 3 and 4 stand for its last two layers.

    Args:
        base: a run with `BASE_LAYERS` layers in each stack.
        shorter: for each stack, a run in which it has one layer less.
        lengths: how many layers each stack really has.
    """
    found: dict[Key, Rows] = {}
    for key, segment in base.items():
        rows = segment.rows.copy()
        for number, (run, length) in enumerate(zip(shorter, lengths, strict=True)):
            own = key.moved(_IN_SHORTER[key.position]) if key.stack == number else key
            less = run.get(own)
            if less is None or less.operations != segment.operations or less.rows.shape != segment.rows.shape:
                return None
            rows += (length - BASE_LAYERS) * (segment.rows - less.rows)
        found[key] = rows
    return found


def confirms(run: Timeline, base: Timeline, found: dict[Key, Rows], lengths: Sequence[int]) -> bool:
    """Return whether a run with stacks of `lengths` did exactly what was extrapolated, in each layer."""
    expected = sum(lengths[key.stack] / BASE_LAYERS if key.stack >= 0 else 1 for key in base)
    if len(run) != round(expected):
        return False
    for key, segment in run.items():
        length = lengths[key.stack] if key.stack >= 0 else 0
        if key.stack < 0 or key.position <= 2:
            at, weight = key, 0
        elif key.position >= length - 2:
            at, weight = key.moved(BASE_LAYERS - length + key.position), 0
        else:
            at, weight = key.moved(2), key.position - 2
        if at not in found or base[at].operations != segment.operations or found[at].shape != segment.rows.shape:
            return False
        rows = found[at]
        if weight:
            last = found.get(at.moved(3))
            if last is None or last.shape != rows.shape:
                return False
            steps = length - BASE_LAYERS + 1
            if not np.array_equal(steps * segment.rows, steps * rows + weight * (last - rows)):
                return False
        elif not np.array_equal(segment.rows, rows):
            return False
    return True
