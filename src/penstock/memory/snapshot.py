"""What a failed attempt has changed although it failed, put back: random states and the model's buffers."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states that a step may draw from: torch's on the CPU and on devices, NumPy's, Python's.

    Two are equal when the same numbers would be drawn from them. Takes no tensor operation, so that nothing can fail.
    """

    generators: tuple[_GeneratorState, ...]
    numpys: _NumpyState | None
    pythons: Any

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        """Return the states of this moment; `devices` are accelerators."""
        numpy_random = sys.modules.get("numpy.random")
        generators = (torch.default_generator, *map(_generator_of, devices))
        return cls(
            generators=tuple(_GeneratorState(generator, generator.get_state()) for generator in generators),
            numpys=_NumpyState(numpy_random.get_state()) if numpy_random is not None else None,
            pythons=random.getstate(),
        )

    def restore(self) -> None:
        """Put all of them back."""
        for one in self.generators:
            one.generator.set_state(one.state)
        if self.numpys is not None:
            sys.modules["numpy.random"].set_state(self.numpys.state)
        random.setstate(self.pythons)


class _GeneratorState:
    def __init__(self, generator: torch.Generator, state: Tensor) -> None:
        self.generator = generator
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GeneratorState) and self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> bytes:
        return ctypes.string_at(self.state.data_ptr(), self.state.numel())


class _NumpyState:
    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumpyState) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[Any, ...]:
        name, keys, *rest = self.state
        return (name, keys.tobytes(), *rest)


class Buffers:
    """The model's buffers (running statistics and the like), saved and put back.

    Memory for the copies is taken when it is first needed, and kept. A buffer that the model replaced by another
    tensor is put back as the object that it was, and one that it has made since is taken away.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._places: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._held: list[Tensor] = []
        self._copies: list[Tensor] = []

    def save(self) -> None:
        """Copy them. May be called again after it has failed."""
        self.forget()
        places = [(module, dict(module._buffers)) for module in self._modules]
        held = [buffer for _, buffers in places for buffer in buffers.values() if buffer is not None]
        if [(b.shape, b.dtype, b.device) for b in held] != [(c.shape, c.dtype, c.device) for c in self._copies]:
            self._copies = []
            self._copies = [torch.empty_like(buffer) for buffer in held]
        if held:
            torch._foreach_copy_(self._copies, held)
        self._places, self._held = places, held

    def forget(self) -> None:
        """Let what was saved be obsolete: from now on there is nothing to put back."""
        self._places, self._held = [], []

    def restore(self) -> None:
        """Put back what was saved last. May be called again after it has failed."""
        if self._held:
            with torch.no_grad():
                torch._foreach_copy_(self._held, self._copies)
        for module, buffers in self._places:
            module._buffers.clear()
            module._buffers.update(buffers)


def _generator_of(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index: int | None = device.index
    found: torch.Generator = module.default_generators[module.current_device() if index is None else index]
    return found
