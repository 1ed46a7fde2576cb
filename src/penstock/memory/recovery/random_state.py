"""RandomState: the states of all generators that a step may draw from, saved and restored.

The states of torch's, NumPy's and Python's generators on the host are 624 numbers each, which takes up to a tenth of a
millisecond in every step, and mostly nothing was drawn since. So a Mersenne Twister's position and words beside it are
compared where they lie in memory, and `get_state` is called only for a generator where they have changed. Each draw
moves the position, and where that begins anew all words are made anew: that 16 of them stay has a chance of 2^-512.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WORDS = 624
_NBYTES = 4 * (_WORDS + 1)
"""A Mersenne Twister's words, and its position among them."""
_LOOKED_AT = 4 * 17
"""The bytes of NumPy's and Python's position, and of the words beside it."""
_TORCH_HEAD, _TORCH_NBYTES = 20, 20 + 4 * _WORDS + 28
"""In a generator of torch's: the bytes before its words, and those of all that is a state."""
_TORCH_WORDS, _TORCH_STATE = 24, 5056
"""Where in what torch's `get_state` returns the words begin, each of 8 bytes; and the bytes of all."""
_TORCH_TRIED = (0, 2), (8, 2), (16, 2), (24, 2), (16 + 8 * _WORDS, 2), (5040, 1), (5024, 2), (5052, 1)
"""Bits of that: of the seed, the position, the first and last word, and of what is left of two normal numbers."""


@dataclass(slots=True, eq=False)
class RandomState:
    """The random states that a step may draw from: torch's on the CPU and on devices, NumPy's, Python's.

    Two are equal when the same numbers would be drawn from them. No method runs a tensor operation, so none can run
    out of memory.
    """

    torchs: Tensor
    numpy: _NumpyState | None
    python: Any
    generators: list[tuple[torch.Generator | _ModulesGenerator, Tensor]]
    """Those of accelerators."""

    @classmethod
    def now(cls, devices: Collection[torch.device]) -> RandomState:
        """Return the current states; `devices` are accelerators."""
        host = _host.now()
        if not devices:
            return host
        return cls(
            host.torchs, host.numpy, host.python, [(one, one.get_state()) for one in map(_generator_of, devices)]
        )

    def restore(self) -> None:
        """Restore all of them."""
        torch.default_generator.set_state(self.torchs)
        for generator, state in self.generators:
            generator.set_state(state)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy.state)
        random.setstate(self.python)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._contents() == other._contents()

    __hash__ = None  # type: ignore[assignment]

    def _contents(self) -> tuple[Any, ...]:
        states = [self.torchs, *(state for _, state in self.generators)]
        words = [ctypes.string_at(state.data_ptr(), state.numel()) for state in states]
        return words, self.numpy, self.python


class _NumpyState:
    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NumpyState) and pickle.dumps(self.state) == pickle.dumps(other.state)

    __hash__ = None  # type: ignore[assignment]


_NOTHING = memoryview(b"")


class _Twister:
    """A Mersenne Twister, whose state is read only if it has changed since the last time.

    Args:
        find: returns the memory of a generator that differs when its state does; nothing where that is not known.
        get_state: returns the state, slowly.
        is_covered: whether that memory covers all of a state.
    """

    def __init__(
        self,
        find: Callable[[Any], memoryview],
        get_state: Callable[[], Any],
        is_covered: Callable[[Any], bool] = lambda state: True,
    ) -> None:
        self._find, self._get_state, self._is_covered = find, get_state, is_covered
        self.memory = _NOTHING
        self._owner: Any = None
        """Whose memory it is, which is kept alive."""
        self._seen: Any = None
        """What the memory was before the state was read, and what stood beside it; None if that does not tell."""
        self.state: Any = None

    def read(self, owner: Any, beside: object = None) -> bytes | None:
        """Read the state of `owner`, if it may have changed. Return its memory; None if that tells of no change."""
        if owner is not self._owner:
            self.memory, self._owner, self._seen = self._find(owner), owner, None
        memory = self.memory.tobytes()
        if (memory, beside) != self._seen:
            self.state = self._get_state()
            self._seen = (memory, beside) if memory and self._is_covered(self.state) else None
        return None if self._seen is None else memory


def _get_numpys() -> _NumpyState:
    return _NumpyState(sys.modules["numpy.random"].get_state(legacy=False))


class _Host:
    """The generators on the host, of which nothing is read as long as their memory is the same."""

    def __init__(self) -> None:
        self._torch = _Twister(_find_torch, torch.default_generator.get_state)
        # NumPy keeps the second of two normal numbers where it cannot be read.
        self._numpy = _Twister(_find_numpy, _get_numpys, lambda known: not known.state["has_gauss"])
        self._python = _Twister(_find_python, random.getstate)
        self._seen: Any = None
        self._state: Any = None

    def now(self) -> RandomState:
        """Return the states, without those of accelerators."""
        numpy_random: Any = sys.modules.get("numpy.random")
        python: Any = random._inst
        numpy = None if numpy_random is None else numpy_random.get_bit_generator()
        memories = self._torch.memory.tobytes(), self._numpy.memory.tobytes(), self._python.memory.tobytes()
        seen = numpy, python, python.gauss_next, memories
        if seen != self._seen:
            read = (
                self._torch.read(torch.default_generator),
                b"" if numpy is None else self._numpy.read(numpy),
                self._python.read(python, python.gauss_next),
            )
            numpys = None if numpy is None else self._numpy.state
            self._state = RandomState(self._torch.state, numpys, self._python.state, [])
            self._seen = None if None in read else (*seen[:3], read)
        state: RandomState = self._state
        return state


def _find_torch(generator: Any) -> memoryview:
    """Return all of the state, if another generator that is tried out has it there."""
    tried: Any = torch.Generator()
    begin = _find_words(tried)
    if begin is None:
        return _NOTHING
    memory = _memory_at(tried._cdata + begin, _TORCH_NBYTES)
    for place, bit in _TORCH_TRIED:
        state, before = tried.get_state(), memory.tobytes()
        (ctypes.c_ubyte * _TORCH_STATE).from_address(state.data_ptr())[place] ^= bit
        tried.set_state(state)
        if memory.tobytes() == before:
            return _NOTHING
    return _memory_at(generator._cdata + begin, _TORCH_NBYTES)


def _find_words(generator: Any) -> int | None:
    """Return how far from its address the state of a generator of torch's begins."""
    state = generator.get_state()
    if not hasattr(generator, "_cdata") or state.numel() != _TORCH_STATE:
        return None
    words = ctypes.string_at(state.data_ptr() + _TORCH_WORDS, 8 * 16)
    first = b"".join(words[at : at + 4] for at in range(0, len(words), 8))
    found = ctypes.string_at(generator._cdata, 512).find(first)
    return None if found < _TORCH_HEAD else found - _TORCH_HEAD


def _find_numpy(generator: Any) -> memoryview:
    """Return the last words, and the position, which follows them."""
    if type(generator) is not sys.modules["numpy.random"].MT19937:
        return _NOTHING
    return _memory_at(generator.ctypes.state_address + _NBYTES - _LOOKED_AT, _LOOKED_AT)


def _find_python(generator: Any) -> memoryview:
    """Return the position, and the first words."""
    return _memory_at(id(generator) + object.__basicsize__, _LOOKED_AT) if _can_peek_python() else _NOTHING


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))


@functools.cache
def _can_peek_python() -> bool:
    """Return whether CPython's generator object consists of its head, its position, and its words, as assumed here."""
    size = object.__basicsize__ + _NBYTES
    if sys.implementation.name != "cpython" or not size <= _random.Random.__basicsize__ <= size + 8:
        return False
    position, *words = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(id(random._inst) + size - _NBYTES, _NBYTES))
    return bool((*words, position) == random.getstate()[1])


_host = _Host()


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
