"""Which lines of a step prepare its batch: what they compute is made of the batch, and of nothing that is learned.

No parameter, no gradient and no value of Python's that differs between steps goes into it, no tensor that the program
changes from step to step, and no module with parameters is called around it. So it could as well be computed before
the step. What a long convolution among it takes is compared with what an FFT of the same sizes takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from penstock.observe.doctor.probes.source_lines import line_text
from penstock.observe.doctor.probes.steps.layer_use import called_modules
from penstock.observe.doctor.probes.torch_threads import one_thread
from penstock.observe.doctor.step_results import PreparingLine
from penstock.observe.doctor.thresholds import THRESHOLDS

_Line = tuple[str, int]
_MOST_NUMBERS = 1 << 24
"""Of all products of spectra: larger ones are not tried."""
_SIZES = 4
"""Of convolutions that are tried, those that take the longest."""
_TRIES, _TRIES_S = 8, 0.4
"""Of each FFT."""


class CallTime(NamedTuple):
    """What a call took."""

    wall_s: float
    processor_s: float
    """Of all threads of this process."""


class _Origin(NamedTuple):
    tensor: torch.Tensor
    """Kept, so that no other has its id."""
    is_of_batch: bool
    is_learned: bool
    """Whether a parameter may be part of it."""
    memory: frozenset[int]
    """Where the tensors lie that it is made of, and that no operation of its step has made."""


class _Convolution(NamedTuple):
    """The sizes of one."""

    samples: int
    channels: int
    length: int
    weight: tuple[int, ...]
    groups: int


@dataclass(slots=True)
class _Preparing:
    wall_s: float = 0.0
    processor_s: float = 0.0
    memory: set[int] = field(default_factory=set)
    convolutions: dict[_Convolution, list[float]] = field(default_factory=dict)


class BatchPreparation:
    """Follows what observed steps make of their batches."""

    def __init__(self) -> None:
        self._made: dict[int, _Origin] = {}
        self._lines: dict[_Line, _Preparing] = {}
        self._others: set[_Line] = set()
        """Lines that also compute with something that is learned."""

    def begin_step(self, batch: Any) -> None:
        """Forget the step before; this one gets `batch`."""
        self._made = {id(one): _Origin(one, True, False, frozenset()) for one in _tensors(batch)}

    def end_step(self) -> None:
        """Let go of a step's tensors."""
        self._made.clear()

    def note(
        self,
        line: _Line,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        spent: CallTime,
        *,
        is_from_elsewhere: bool,
    ) -> None:
        """Note that a line computed `made`, and whether Python or a mean of parameters has part in it."""
        operands = [self._origin(one) for one in _tensors((args, kwargs))]
        is_of_batch = any(one.is_of_batch for one in operands)
        is_gradient = getattr(func, "__self__", None) is torch.Tensor.grad
        results = _tensors(made)
        is_learned = is_from_elsewhere or is_gradient or any(one.is_learned for one in operands)
        is_learned |= any(one.requires_grad for one in results)
        memory = frozenset[int]().union(*(one.memory for one in operands))
        for one in results:
            if one.requires_grad:  # which says it all; it is freed when the step lets go of it
                self._made.pop(id(one), None)
            else:
                self._made[id(one)] = _Origin(one, is_of_batch, is_learned, memory)
        if is_learned or (is_of_batch and any(any(True for _ in one.parameters()) for one in called_modules())):
            self._others.add(line)
        elif is_of_batch:
            seen = self._lines.setdefault(line, _Preparing())
            seen.wall_s += spent.wall_s
            seen.processor_s += spent.processor_s
            seen.memory |= memory
            if func is torch.conv1d and (sizes := _long_convolution(*args, **kwargs)) is not None:
                seen.convolutions.setdefault(sizes, []).append(spent.wall_s)

    def result(self, training: Collection[str], changing: Collection[int]) -> tuple[PreparingLine, ...]:
        """Return those of the lines that gradients depend on, `training`, without those that use what changes.

        `changing` is where tensors lie that steps change.
        """
        return tuple(
            PreparingLine(
                line=line_text(*line),
                cores=seen.processor_s / max(1e-9, seen.wall_s),
                taps=max((one.weight[-1] for one in seen.convolutions), default=0),
                left_by_fft=_left_by_fft(seen),
            )
            for line, seen in self._lines.items()
            if line not in self._others and seen.memory.isdisjoint(changing) and line_text(*line) in training
        )

    def _origin(self, one: torch.Tensor) -> _Origin:
        is_learned = one.requires_grad or isinstance(one, torch.nn.Parameter)
        known = self._made.get(id(one))
        if known is not None:
            return _Origin(known.tensor, known.is_of_batch, known.is_learned or is_learned, known.memory)
        place = one.untyped_storage().data_ptr() if one.layout is torch.strided else 0
        return _Origin(one, False, is_learned, frozenset([place] if place else []))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _long_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Convolution | None:
    """Return the sizes of a convolution that an FFT can compute, if its kernel is long; the arguments are conv1d's."""
    is_plain = all(one in (1, (1,), [1]) for one in (stride, dilation)) and x.dtype is torch.float32
    if not is_plain or weight.shape[-1] < THRESHOLDS.long_kernel:
        return None
    samples = x.shape[0] if x.ndim > 2 else 1
    return _Convolution(samples, x.shape[-2], x.shape[-1], tuple(weight.shape), groups)


def _left_by_fft(seen: _Preparing) -> float:
    """Return the time of a line with its long convolutions computed by FFT, as a fraction of what it takes."""
    saved_s, whole_s = 0.0, seen.wall_s
    longest = sorted(seen.convolutions.items(), key=lambda one: -sum(one[1]))
    for sizes, seconds in longest[:_SIZES]:
        by_fft_s = _time_fft(sizes)
        whole_s -= sum(seconds) - len(seconds) * min(seconds)  # what other programs added is of neither
        saved_s += len(seconds) * max(0.0, min(seconds) - by_fft_s) if by_fft_s is not None else 0.0
    return max(0.0, 1 - saved_s / max(1e-9, whole_s))


def _time_fft(sizes: _Convolution) -> float | None:
    """Return how long a convolution of these sizes takes by FFT; None where it would need too much memory."""
    outputs, inputs, taps = sizes.weight
    size = 1 << (sizes.length + taps - 2).bit_length()
    if sizes.samples * outputs * inputs * size > _MOST_NUMBERS:
        return None
    x = torch.rand(sizes.samples, sizes.groups, 1, sizes.channels // sizes.groups, sizes.length, generator=_generator())
    kernel = torch.rand(sizes.groups, outputs // sizes.groups, inputs, taps, generator=_generator())
    taken_s: list[float] = []
    with torch.no_grad(), one_thread():
        while len(taken_s) < 2 or (len(taken_s) < _TRIES and sum(taken_s) < _TRIES_S):
            began = time.perf_counter()
            product = (torch.fft.rfft(x, size) * torch.fft.rfft(kernel, size)).sum(3)
            torch.fft.irfft(product, size)
            taken_s.append(time.perf_counter() - began)
    return min(taken_s)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
