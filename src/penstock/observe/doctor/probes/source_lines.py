"""What the source of the user's program says of a line: its statement, and what that is made of."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from collections.abc import Callable, Iterator

_VARIES = re.compile(
    r"rand|shuffle|permut|choice|sample\(|seed|uniform|\.normal\(|\btime\b|sleep|uuid|next\(|getpid|worker_info"
)
"""Of an expression whose value may be another one each time, although it is made of the same names."""

_RANDOM = re.compile(
    r"\brand\w*\(|random|rng\b|\.(uniform|normal|integers|choice|choices|permutation|shuffle|multinomial)\(|bernoulli"
)
"""Of an expression that draws random numbers."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def line_text(file: str, number: int) -> str:
    """Return a line with its file's name and its number."""
    text = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}:{number}: {text}" if text else f"{os.path.basename(file)}:{number}"


@functools.lru_cache(maxsize=8)
def parse(file: str) -> ast.Module:
    """Return the syntax tree of a file.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    return ast.parse("".join(linecache.getlines(file)))


def extent(node: ast.stmt) -> range:
    """Return the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def statements_at(file: str, number: int) -> list[ast.stmt]:
    """Return the statements that hold a line, the innermost one first; empty where the file cannot be read."""
    try:
        tree = parse(file)
    except (SyntaxError, ValueError):
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and number in extent(node)]
    return sorted(around, key=lambda node: len(extent(node)))


def is_same_for_all(file: str, number: int) -> bool:
    """Return whether a line computes something that does not depend on the sample, and gives it a name.

    It is made of the dataset's attributes, of names outside of the function, and of what that function makes of these;
    calls of the dataset's own methods are taken to depend on the sample.
    """
    around = statements_at(file, number)
    functions = [node for node in around if isinstance(node, Function)]
    if not around or not functions or not isinstance(around[0], ast.Assign | ast.AnnAssign):
        return False
    statement, function = around[0], functions[0]
    named = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if statement.value is None or not all(isinstance(target, ast.Name | ast.Tuple) for target in named):
        return False
    makes = (ast.Call, ast.ListComp, ast.DictComp, ast.SetComp)
    if not any(isinstance(node, makes) for node in ast.walk(statement.value)) or _calls_itself(statement.value):
        return False
    if _VARIES.search(ast.unparse(statement.value)) or not function.args.args[1:]:
        return False
    return not _names(statement.value, ast.Load) & _varying(function)


def is_random(file: str, number: int) -> bool:
    """Return whether a line computes with random numbers, or with what its function makes of them.

    What a function is given counts where its name says so (`rng`).
    """
    around = statements_at(file, number)
    functions = [node for node in around if isinstance(node, Function)]
    if not functions or isinstance(around[0], Function):
        return False
    return _draws(around[0]) or bool(_names(around[0], ast.Load) & _made_of(functions[0], set(), _draws))


def _draws(value: ast.AST) -> bool:
    return bool(_RANDOM.search(ast.unparse(value)))


def _varying(function: Function) -> set[str]:
    """Return the names in a method that may differ between its calls: arguments, and what is made of them."""
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    loops = [_names(node.target, ast.Store) for node in ast.walk(function) if isinstance(node, ast.For)]
    return _made_of(
        function,
        {one.arg for one in arguments[1:]}.union(*loops),
        lambda value: _calls_itself(value) or bool(_VARIES.search(ast.unparse(value))),
    )


def _made_of(function: Function, names: set[str], is_origin: Callable[[ast.AST], bool]) -> set[str]:
    """Return names in a function, and all that is made of them, or of an expression that is an origin."""
    known = -1
    while known != len(names):
        known = len(names)
        for made, into in _assignments(function):
            if _names(made, ast.Load) & names or is_origin(made):
                names |= _names(into, ast.Store)
    return names


def _assignments(function: Function) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield what a function gives names to, and the node that has the names."""
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            yield node.iter, node.target
        elif isinstance(node, ast.withitem):
            yield node.context_expr, node
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.value, node


def _calls_itself(value: ast.AST) -> bool:
    """Return whether `value` calls something that it reaches through `self`."""
    return any(isinstance(node, ast.Call) and _root(node.func) == "self" for node in ast.walk(value))


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names that `node` loads or stores, without those of its comprehensions."""
    own = {
        name.id
        for one in ast.walk(node)
        if isinstance(one, ast.comprehension)
        for name in ast.walk(one.target)
        if isinstance(name, ast.Name)
    }
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
    return found - own
