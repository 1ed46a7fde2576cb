"""The statements of a program's file around a line: which loop it is in."""

from __future__ import annotations

import ast
import functools
import linecache

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.lru_cache(maxsize=8)
def _parse(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def extent(node: ast.stmt) -> range:
    """Return the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def statements_at(file: str, number: int) -> list[ast.stmt]:
    """Return the statements that hold a line, the innermost one first; empty where the file cannot be read."""
    try:
        tree = _parse(file)
    except (SyntaxError, ValueError):
        return []
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and number in extent(node)]
    return sorted(around, key=lambda node: len(extent(node)))
