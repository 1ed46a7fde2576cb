"""Lists, dictionaries, sets, queues and caches that a program's variables lead to, and which of them grow."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.core.object_attributes import attributes_of
from penstock.observe.doctor.probes.frame_variables import variables_of

_LRU_CACHE = functools._lru_cache_wrapper
_CONTAINERS = (list, dict, set, deque)
_SEALED = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None), ModuleType, DataLoader, Dataset)
"""What keeps nothing of the steps, or has causes of its own: what datasets keep is looked at in a worker."""

_MOST_VALUES, _DEPTH, _ELEMENTS = 20_000, 8, 64
_MOST_PARTS, _MOST_NODES = 10_000, 5_000


class Container(NamedTuple):
    """A container, as it was when it was looked at."""

    value: Any
    size: int
    """How many elements it has."""


def find_containers(frames: Iterable[FrameType]) -> dict[str, Container]:
    """Return the containers that the variables of functions, and of their modules, lead to, by their names.

    Args:
        frames: the functions of a program that run.
    """
    found: dict[str, Container] = {}
    seen: set[int] = set()
    own_modules: set[str] = set()
    left: deque[tuple[str, Any, int]] = deque()
    for frame in frames:
        scopes: list[Mapping[str, Any]] = [variables_of(frame), frame.f_globals]
        own_modules.add(frame.f_globals.get("__name__", ""))
        left += [(name, value, 0) for scope in scopes for name, value in [*scope.items()]]
    while left and len(seen) < _MOST_VALUES:
        name, value, depth = left.popleft()
        if issubclass(type(value), _SEALED) or id(value) in seen:
            continue
        seen.add(id(value))
        size = _size(value)
        if size is not None:
            found[name] = Container(value, size)
        if depth < _DEPTH:
            left += [(part, one, depth + 1) for part, one in _parts(name, value, own_modules)]
    return found


def last_elements(value: Any, number: int) -> list[Any]:
    """Return what was put into a container last, or some of its elements where they have no order."""
    if issubclass(type(value), _LRU_CACHE):
        value = max((one for one in gc.get_referents(value) if type(one) is dict), key=len, default={})
    if issubclass(type(value), dict):
        return [one for one, _ in zip(reversed(dict.values(value)), range(number), strict=False)]
    if issubclass(type(value), set):
        return [one for one, _ in zip(set.__iter__(value), range(number), strict=False)]
    return _elements(value)[-number:]


class Held(NamedTuple):
    """What a value keeps alive."""

    nbytes: int
    """About how much memory."""

    unused_nbytes: int
    """How much of that belongs to tensors of which only a part is there."""

    has_graph: bool
    """Whether a tensor has the graph that computed it."""


def measure_held(value: Any) -> Held:
    """Return what a value and its parts keep alive.

    >>> measure_held({"loss": torch.ones(250, requires_grad=True).exp()}).has_graph
    True
    >>> measure_held([torch.ones(100, 250)[7]]).unused_nbytes
    99000
    """
    with torch._C.DisableTorchFunctionSubclass():  # nothing of the program's own runs
        return _measure_held(value)


def _measure_held(value: Any) -> Held:
    nbytes, used, has_graph = 0, Counter[int](), False
    left, seen, storages = [value], dict[int, Any](), dict[int, int]()
    while left and len(seen) < _MOST_PARTS:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # held: another object could get its number
        if issubclass(type(one), torch.Tensor):
            held = [one]
            if one.grad_fn is not None:
                has_graph = True
                held += _saved_in_graph(one.grad_fn)
            found = [storage for part in held if (storage := _storage_of(part)) is not None]
            storages |= {storage._cdata: storage.nbytes() for storage in found}
            if (own := _storage_of(one)) is not None:
                used[own._cdata] += one.nbytes
        elif issubclass(type(one), np.ndarray):
            nbytes += one.nbytes if one.base is None else 0
            left += [] if one.base is None else [one.base]
        else:
            nbytes += _own_nbytes(one)
            if issubclass(type(one), list | tuple | set | deque):
                left += _elements(one)
            elif issubclass(type(one), dict):
                left += [*dict.values(one)]
            else:
                left += [*attributes_of(one).values()]
    unused = sum(max(0, storages[key] - part) for key, part in used.items())
    return Held(nbytes + sum(storages.values()), unused, has_graph)


def _elements(value: Any) -> list[Any]:
    """Return what is in a list, a tuple, a set or a queue, however its class iterates."""
    return [*_kind_of(value).__iter__(value)]


def _kind_of(value: Any) -> Any:
    return next(one for one in (list, tuple, set, deque) if issubclass(type(value), one))


def _own_nbytes(one: Any) -> int:
    try:
        return sys.getsizeof(one, 0)
    except Exception:  # an object's own __sizeof__ may do anything
        return 0


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None
    except (RuntimeError, NotImplementedError):  # of classes that only wrap others
        return None


def _saved_in_graph(last: Any) -> list[torch.Tensor]:
    """Return what the nodes of a graph hold for gradients: nothing once these were computed."""
    saved: list[torch.Tensor] = []
    nodes = {last: None}
    left = deque(nodes)
    while left:
        node = left.popleft()
        parents = {parent: None for parent, _ in node.next_functions if parent is not None and parent not in nodes}
        if len(nodes) < _MOST_NODES:
            nodes |= parents
            left += parents
        kind: Any = type(node)
        for name in _saved_names(kind):
            try:
                value = getattr(node, name)
            except RuntimeError:  # it has been freed
                continue
            saved += [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, torch.Tensor)]
    return saved


@functools.cache
def _saved_names(node: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors")


def _size(value: Any) -> int | None:
    """Return how many elements a container has; None for what is none, and for those that are bounded."""
    if issubclass(type(value), _LRU_CACHE):
        return int(value.cache_info().currsize) if value.cache_info().maxsize is None else None
    if issubclass(type(value), deque) and value.maxlen is not None:
        return None
    kind = next((one for one in _CONTAINERS if issubclass(type(value), one)), None)
    return kind.__len__(value) if kind is not None else None


def _parts(name: str, value: Any, own_modules: set[str]) -> Iterator[tuple[str, Any]]:
    if issubclass(type(value), dict) and dict.__len__(value) <= _ELEMENTS:
        yield from ((f"{name}[{_key_text(key)}]", one) for key, one in [*dict.items(value)])
    elif issubclass(type(value), list | tuple | deque):
        if _kind_of(value).__len__(value) <= _ELEMENTS:
            yield from ((f"{name}[{number}]", one) for number, one in enumerate(_elements(value)))
    elif issubclass(type(value), FunctionType):
        if value.__module__ in own_modules:
            yield from _parts_of_function(name, value)
    elif issubclass(type(value), _LRU_CACHE | MethodType):
        yield name, value.__wrapped__ if issubclass(type(value), _LRU_CACHE) else value.__func__
        yield name, getattr(value, "__self__", None)
    elif issubclass(type(value), type):
        if value.__module__ in own_modules:
            yield from ((f"{name}.{key}", one) for key, one in [*vars(value).items()])
    elif not str(type(value).__module__).startswith("penstock."):
        attributes = attributes_of(value)
        children = attributes.get("_modules") if issubclass(type(value), torch.nn.Module) else None
        yield from ((f"{name}.{key}", one) for key, one in [*attributes.items(), *(children or {}).items()])


def _parts_of_function(name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps between its calls: the variables around it, its default values and attributes."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield variable, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"the default values of {name}", one) for one in function.__defaults__ or ())
    yield from ((f"{name}.{key}", one) for key, one in [*vars(function).items()])


def _key_text(key: Any) -> str:
    return f"{key!r:.40}" if type(key) in (str, int) else f"a {type(key).__name__}"
