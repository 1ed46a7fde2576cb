"""The names that a function reads, and those that it gives another value where other functions may see it."""

from __future__ import annotations

import dis
import functools
import linecache
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

_ANYTHING = frozenset({"setattr", "delattr", "globals", "vars", "exec", "eval"})
"""Functions of Python's that may give a value to any name."""

_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_ASSIGNS = frozenset(f"{what}_{where}" for what in ("STORE", "DELETE") for where in ("GLOBAL", "DEREF", "ATTR"))


class Names(NamedTuple):
    """Of a function, and of those that it defines."""

    read: frozenset[str]
    assigned: frozenset[str]
    """Variables of its module and of functions around it, and attributes of other objects than its own."""
    is_unknown: bool
    """Whether it may assign others."""


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType, *, has_object: bool = True) -> Names:
    """Return what a function reads, and what it assigns beside its own object; a method, unless it is a class's.

    `self.step` is the object's own here:

    >>> class Schedule:
    ...     def advance(self, options):
    ...         self.step, options.rate = self.step + 1, options.rate / 2
    >>> names = names_of(Schedule.advance.__code__)
    >>> sorted(names.assigned), sorted(names.read), names.is_unknown
    (['rate'], ['rate', 'step'], False)
    """
    read, called, assigned = set[str](), set[str](), set[str]()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            name, what = str(instruction.argval), instruction.opname
            if what.startswith(_READS):
                read.add(name)
                called.update([name] if what in ("LOAD_GLOBAL", "LOAD_NAME") else [])
            elif what in _ASSIGNS and not _stays_inside(code, one, instruction, has_object=has_object):
                assigned.add(name)
    return Names(frozenset(read), frozenset(assigned), not called.isdisjoint(_ANYTHING) or "__dict__" in read)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _stays_inside(function: CodeType, code: CodeType, instruction: dis.Instruction, *, has_object: bool) -> bool:
    """Return whether what is assigned is a variable of this function, or an attribute of a method's own object.

    The source says the latter.
    """
    if not instruction.opname.endswith("ATTR"):
        return instruction.opname.endswith("DEREF") and instruction.argval not in function.co_freevars
    is_method = (
        has_object
        and code.co_argcount > 0
        and code.co_qualname.rpartition(".")[0].rpartition(".")[2] not in ("", "<locals>")
    )
    where = instruction.positions
    if not is_method or where is None or where.lineno is None or where.lineno != where.end_lineno:
        return False
    line = linecache.getline(code.co_filename, where.lineno).encode()
    return line[where.col_offset : where.end_col_offset].decode() == f"{code.co_varnames[0]}.{instruction.argval}"
