"""The Python blocks of a page, and what the comments before them say about running them."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"
FRAMEWORKS = RECIPES.parent / "guides/frameworks.md"
_BLOCK = re.compile(
    r"((?:<!-- (?:setup|not run|needs):(?:(?!-->).)*-->\n)*)^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_NEEDS = re.compile(r"<!-- needs: ([\w.]+) -->")


def run_page(page: Path | str) -> None:
    """Run the blocks of a page one after another, in one namespace, in this folder.

    `<!-- setup: CODE -->` before a block runs first; `<!-- not run: REASON -->` leaves the block out, and
    `<!-- needs: MODULE -->` leaves out it and its setup where that is not installed.
    """
    names: dict[str, object] = {"__name__": "a_page"}
    torch.manual_seed(0)
    for line, comments, code in python_blocks(Path(page).read_text()):
        if not all(map(_is_installed, _NEEDS.findall(comments))):
            continue
        for setup in setups(comments):
            exec(compile(setup, f"{page}:{line} (setup)", "exec", dont_inherit=True), names)
        compiled = compile("\n" * line + code, str(page), "exec", dont_inherit=True)
        if "<!-- not run: " not in comments:
            exec(compiled, names)
    names.clear()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would lie in
        return False


def python_blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the comments before it and the code of each Python block."""
    for found in _BLOCK.finditer(text):
        yield text[: found.start(3)].count("\n") + 1, found[1], textwrap.dedent(found[3])


def setups(comments: str) -> list[str]:
    """Return the code of the comments `<!-- setup: CODE -->`."""
    return [textwrap.dedent(setup) for setup in re.findall(r"<!-- setup:\n(.*?)-->", comments, re.DOTALL)]


def recipe(heading: str, path: Path = RECIPES) -> str:
    """Return the program under a heading of a page, by default docs/recipes.md, with what its recipes share."""
    page = path.read_text()
    section = re.split(r"\n##+ ", re.split(rf"\n##+ {heading}\n", page)[1])[0]
    ((_, comments, code),) = python_blocks(section)
    return "\n".join([*dict.fromkeys([*setups(page)[:1], *setups(comments)]), code])
