"""The random states that a step may draw from, kept and put back.

NumPy's and Python's are 624 numbers each that pass through Python one by one: a tenth of a millisecond in every step,
and mostly nothing was drawn since. So the words of a Mersenne twister are looked at where they lie, and only one that
has moved is asked for its state.
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
"""A Mersenne twister's words, and its place among them."""


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
        generators = (torch.default_generator, *map(_generator_of, devices))
        return cls(
            generators=tuple(_GeneratorState(generator, generator.get_state()) for generator in generators),
            numpys=_numpys.now() if "numpy.random" in sys.modules else None,
            pythons=_pythons.now(),
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


class _Twister:
    """A Mersenne twister, asked for its state when that is another than at the last time.

    Args:
        look: returns what differs when the state does; None where that cannot be seen.
        ask: returns the state.
        is_seen: whether all of a state can be seen.
    """

    def __init__(
        self, look: Callable[[], Any], ask: Callable[[], Any], is_seen: Callable[[Any], bool] = lambda state: True
    ) -> None:
        self._look = look
        self._ask = ask
        self._is_seen = is_seen
        self._known: tuple[Any, Any] = None, None

    def now(self) -> Any:
        """Return the state of this moment."""
        seen, (last, state) = self._look(), self._known
        if seen is None or seen != last or not self._is_seen(state):
            state = self._ask()
            self._known = seen, state
        return state


def _look_at_numpys() -> bytes | None:
    numpy_random = sys.modules["numpy.random"]
    generator = numpy_random.get_bit_generator()
    if type(generator) is not numpy_random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _NBYTES)


def _look_at_pythons() -> tuple[bytes, float | None] | None:
    """Return the words, and the second of two normal numbers where it waits to be handed out."""
    if not _pythons_words_lie_open():
        return None
    generator: Any = random._inst
    return ctypes.string_at(id(generator) + object.__basicsize__, _NBYTES), generator.gauss_next


@functools.cache
def _pythons_words_lie_open() -> bool:
    """Whether an object of CPython's generator is its head, its place, and its words."""
    size = object.__basicsize__ + _NBYTES
    if sys.implementation.name != "cpython" or not size <= _random.Random.__basicsize__ <= size + 8:
        return False
    place, *words = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(id(random._inst) + size - _NBYTES, _NBYTES))
    return bool((*words, place) == random.getstate()[1])


_numpys = _Twister(
    _look_at_numpys,
    lambda: _NumpyState(sys.modules["numpy.random"].get_state()),
    lambda known: not known.state[3],  # the second of two normal numbers waits, and cannot be seen
)
_pythons = _Twister(_look_at_pythons, random.getstate)


def _generator_of(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    index: int | None = device.index
    found: torch.Generator = module.default_generators[module.current_device() if index is None else index]
    return found
