"""OutsideNames: what a loss function and the code of layers refer to beside the model, named where it changes.

Closures, arguments' defaults, globals, and the object of a method: counters, hidden states, teachers, metrics. A failed
attempt leaves its changes there, because nobody can say which of them are meant to be undone. So they are compared over
a few windows, and what changes is named when an attempt has failed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.memory.recovery.state_tree import StateTree, differs
from penstock.memory.user_lines import is_packaged, is_users, line_text

_DEPTH = 3
"""How many functions are followed that call one another."""
_EMPTY = object()


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that code of the user's uses."""

    text: str
    read: Callable[[], Any]
    function: types.FunctionType


@dataclass(slots=True)
class _Before:
    """What a name stood for."""

    name: _Name
    value: Any
    tree: StateTree

    def has_changed(self) -> bool:
        """Return whether it is another object by now, or holds something else."""
        if self.name.read() is not self.value:
            return True
        tree = self.tree
        return (
            tree.versions != [one._version for one in tree.tensors]
            or any(differs(one, held) for one, held in tree.containers)
            or any(repr(get()) != repr(state) for get, _, state in tree.generators)
        )


class OutsideNames:
    """The names of one step.

    Args:
        loss_fn: whose names are meant, if there is one.
        modules: the names of their methods are meant, too; what belongs to them is not outside.
        warned: the names that were warned of.
    """

    def __init__(
        self, loss_fn: Callable[..., Any] | None, modules: Sequence[nn.Module], warned: set[str] | None = None
    ) -> None:
        self._modules = modules
        found = list(_names_of(loss_fn, _DEPTH))
        for kind in {type(part) for module in modules for part in module.modules()}:
            for function in filter(inspect.isfunction, vars(kind).values()):
                if not is_packaged(function.__code__.co_filename):
                    found += _names_of(function, _DEPTH)
        self._names = list({(one.text, one.function): one for one in found}.values())
        self._before: list[_Before] = []
        self._changing: dict[str, _Name] = {}
        self.warned = set[str]() if warned is None else warned

    def save(self) -> None:
        """Look at what they stand for now."""
        if not self._names:
            return
        own = {id(part) for module in self._modules for part in module.modules()}
        tree = StateTree(*self._modules, only=nn.Module)
        own |= {*map(id, tree.tensors), *(id(one) for one, _ in tree.containers)}
        self._before = []
        for name in self._names:
            value = name.read()
            found = StateTree(*([] if id(value) in own else [value]), only=nn.Module)
            grads = {id(grad) for _, grad in found.gradients}
            found.tensors = [one for one in found.tensors if id(one) not in own and id(one) not in grads]
            found.versions = [one._version for one in found.tensors]
            found.containers = [(one, held) for one, held in found.containers if id(one) not in own]
            self._before.append(_Before(name, value, found))

    def learn(self) -> None:
        """Note what has changed since."""
        self._changing.update((one.name.text, one.name) for one in self._before if one.has_changed())
        self._before = []

    def warn_of_changes(self) -> None:
        """Warn, once, of each that changes, after an attempt whose changes cannot be undone."""
        changed = {**self._changing, **{one.name.text: one.name for one in self._before if one.has_changed()}}
        for text, name in changed.items():
            if text not in self.warned:
                self.warned.add(text)
                warnings.warn(
                    f"{text} is changed by loss_fn or the model ({_line_of(name)}), and a failed attempt at a step has "
                    "changed it once more than it should be: it belongs neither to the model nor to also=. Keep it in "
                    "the model, or pass the module or the object that has it in also=",
                    stacklevel=2,
                )


def _line_of(name: _Name) -> str:
    """Return the line that gives a name another value, or else the first one that uses it."""
    code, found = name.function.__code__, name.function.__code__.co_firstlineno
    own = name.text.rpartition(".")[2]
    uses = [one for one in dis.get_instructions(code) if one.argval == own and one.positions is not None]
    uses.sort(key=lambda one: not one.opname.startswith("STORE"))
    if uses and uses[0].positions is not None:
        found = uses[0].positions.lineno or found
    return line_text(code.co_filename, found)


def _names_of(function: Any, depth: int) -> Iterator[_Name]:
    """Yield all that a function of the user's refers to."""
    if isinstance(function, functools.partial):
        yield from _names_of(function.func, depth)
    elif isinstance(function, types.MethodType):
        owner = function.__self__
        if not isinstance(owner, nn.Module) and isinstance(function.__func__, types.FunctionType):
            text = f"an attribute of a {type(owner).__name__}"
            yield _Name(text, lambda: getattr(owner, "__dict__", None), function.__func__)
        yield from _names_of(function.__func__, depth)
    elif isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
        yield from _names_in(function, depth)
    elif callable(function) and hasattr(function, "__dict__") and not isinstance(function, (type, nn.Module)):
        yield from _names_of(getattr(function, "__call__", None), depth - 1) if depth else ()  # noqa: B004


def _names_in(function: types.FunctionType, depth: int) -> Iterator[_Name]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(text, functools.partial(_read_cell, cell)) for text, cell in cells]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    held += [("a default of an argument", functools.partial(defaults.__getitem__, at)) for at in range(len(defaults))]
    names = function.__globals__
    held += [(text, functools.partial(names.get, text)) for text in function.__code__.co_names if text in names]
    for text, read in held:
        value = read()
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            yield from _names_of(value, depth - 1) if depth else ()
        elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            yield _Name(text, read, function)


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
