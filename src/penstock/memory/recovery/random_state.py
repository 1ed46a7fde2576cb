"""RandomState: the states of all generators that a step may draw from, saved and restored.

torch's are read each time, which takes a microsecond. NumPy's and Python's take a tenth of a millisecond, and most
steps draw from neither. So they are read in the first windows of a step, and later ever more rarely; where a window was
seen to draw from them, in each (`HostDraws`).
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class RandomState:
    """The random states that a step may draw from: torch's on the CPU and on devices, NumPy's, Python's.

    Two are equal when the same numbers would be drawn from them. No method runs a tensor operation, so none can run
    out of memory.
    """

    torchs: Tensor
    numpy: bytes | None
    """NumPy's, as a pickle; None where it was not read, or NumPy has not been imported."""
    python: Any
    """Python's; None where it was not read."""
    generators: list[tuple[torch.Generator | _ModulesGenerator, Tensor]]
    """Those of accelerators."""

    @classmethod
    def now(cls, devices: Collection[torch.device], *, reads_host: bool = True) -> RandomState:
        """Return the current states.

        Args:
            devices: accelerators.
            reads_host: whether NumPy's and Python's are read.
        """
        numpy_random: Any = sys.modules.get("numpy.random") if reads_host else None
        return cls(
            torch.default_generator.get_state(),
            None if numpy_random is None else pickle.dumps(numpy_random.get_state(legacy=False)),
            random.getstate() if reads_host else None,
            [(one, one.get_state()) for one in map(_generator_of, devices)],
        )

    def restore(self) -> None:
        """Restore all that were read."""
        torch.default_generator.set_state(self.torchs)
        for generator, state in self.generators:
            generator.set_state(state)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(pickle.loads(self.numpy))
        if self.python is not None:
            random.setstate(self.python)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._contents() == other._contents()

    __hash__ = None  # type: ignore[assignment]

    def _contents(self) -> tuple[Any, ...]:
        states = [self.torchs, *(state for _, state in self.generators)]
        words = [ctypes.string_at(state.data_ptr(), state.numel()) for state in states]
        return words, self.numpy, self.python


class HostDraws:
    """Whether the windows of a step draw from NumPy's and Python's generators."""

    def __init__(self) -> None:
        self._windows = 0
        self._are_seen = False

    @property
    def are_read(self) -> bool:
        """Whether their states are read before the next window."""
        return self._are_seen or self._windows & (self._windows - 1) == 0

    def look(self, before: RandomState, devices: Collection[torch.device]) -> None:
        """Note what a window has drawn that began with `before`."""
        if not self._are_seen and before.python is not None:
            now = RandomState.now(devices)
            self._are_seen = (now.numpy, now.python) != (before.numpy, before.python)
        self._windows += 1


def _generator_of(device: torch.device) -> torch.Generator | _ModulesGenerator:
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    if generators is None:  # as torch.mps
        return _ModulesGenerator(module)
    index: int | None = device.index
    found: torch.Generator = generators[module.current_device() if index is None else index]
    return found


class _ModulesGenerator:
    """The generator of a backend that shows its state only, on its current device."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)
