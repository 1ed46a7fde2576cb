"""RandomState: the states of all generators that a step may draw from, saved and restored.

NumPy's and Python's states are 624 numbers each that pass through Python one by one. That takes a tenth of a
millisecond in every step, and mostly nothing was drawn since. So a Mersenne Twister's position and words beside it are
compared where they lie in memory, and `get_state` is called only for a generator where they have changed. Each draw
moves the position, and where that begins anew all words are made anew: that 16 of them stay has a chance of 2^-512.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORDS = 624
_NBYTES = 4 * (_WORDS + 1)
"""A Mersenne Twister's words, and its position among them."""
_LOOKED_AT = 4 * 17
"""The bytes of the position, and of the words beside it."""


@dataclass(slots=True, eq=False)
class RandomState:
    """The random states that a step may draw from: torch's on the CPU and on devices, NumPy's, Python's.

    Two are equal when the same numbers would be drawn from them. No method runs a tensor operation, so none can run
    out of memory.
    """

    generators: list[tuple[torch.Generator | _ModulesGenerator, Tensor]]
    numpy: _NumpyState | None
    python: Any

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        """Return the current states; `devices` are accelerators."""
        own = torch.default_generator
        return cls(
            [(own, own.get_state()), *((one, one.get_state()) for one in map(_generator_of, devices))],
            _numpy_twister.now() if "numpy.random" in sys.modules else None,
            _python_twister.now(),
        )

    def restore(self) -> None:
        """Restore all of them."""
        for generator, state in self.generators:
            generator.set_state(state)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy.state)
        random.setstate(self.python)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._contents() == other._contents()

    __hash__ = None  # type: ignore[assignment]

    def _contents(self) -> tuple[Any, ...]:
        states = [state for _, state in self.generators]
        words = [ctypes.string_at(state.data_ptr(), state.numel()) for state in states]
        return words, self.numpy, self.python


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


class _Twister:
    """A Mersenne Twister, whose state is read only if it has changed since the last time.

    Args:
        peek: returns bytes that differ when the state does; None where they cannot be read.
        get_state: returns the state, slowly.
        is_covered: whether the bytes of `peek` cover all of a state.
    """

    def __init__(
        self,
        peek: Callable[[], Any],
        get_state: Callable[[], Any],
        is_covered: Callable[[Any], bool] = lambda state: True,
    ) -> None:
        self._peek = peek
        self._get_state = get_state
        self._is_covered = is_covered
        self._seen: Any = None
        self._state: Any = None

    def now(self) -> Any:
        """Return the current state."""
        seen = self._peek()
        if seen is None or seen != self._seen:
            self._state = self._get_state()
            self._seen = seen if self._is_covered(self._state) else None
        return self._state


class _Memory:
    """The bytes of a generator's state that are looked at, where they lie."""

    owner: Any = None
    view = memoryview(b"")

    def find(self, owner: Any, address: int) -> None:
        """Look at the state of `owner`, which is kept alive."""
        self.view = memoryview((ctypes.c_char * _LOOKED_AT).from_address(address))
        self.owner = owner


_numpy_memory, _python_memory = _Memory(), _Memory()


def _peek_numpy() -> bytes | None:
    """Return the last words, and the position, which follows them."""
    numpy_random = sys.modules["numpy.random"]
    generator = numpy_random.get_bit_generator()
    if generator is not _numpy_memory.owner:
        if type(generator) is not numpy_random.MT19937:
            return None
        _numpy_memory.find(generator, generator.ctypes.state_address + _NBYTES - _LOOKED_AT)
    return _numpy_memory.view.tobytes()


def _peek_python() -> tuple[bytes, float | None] | None:
    """Return the position and the first words, and the second of two normal numbers if it is still to be returned."""
    if not _can_peek_python():
        return None
    generator: Any = random._inst
    if generator is not _python_memory.owner:
        _python_memory.find(generator, id(generator) + object.__basicsize__)
    return _python_memory.view.tobytes(), generator.gauss_next


@functools.cache
def _can_peek_python() -> bool:
    """Return whether CPython's generator object consists of its head, its position, and its words, as assumed here."""
    size = object.__basicsize__ + _NBYTES
    if sys.implementation.name != "cpython" or not size <= _random.Random.__basicsize__ <= size + 8:
        return False
    position, *words = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(id(random._inst) + size - _NBYTES, _NBYTES))
    return bool((*words, position) == random.getstate()[1])


_numpy_twister = _Twister(
    _peek_numpy,
    lambda: _NumpyState(sys.modules["numpy.random"].get_state()),
    lambda known: not known.state[3],  # NumPy keeps the second of two normal numbers where it cannot be read
)
_python_twister = _Twister(_peek_python, random.getstate)


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
