"""The Python blocks of a page, and what the comments before them say about running them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "docs/recipes.md"
_BLOCK = re.compile(
    r"((?:<!-- (?:setup|not run):(?:(?!-->).)*-->\n)*)^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)


def python_blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the comments before it and the code of each Python block."""
    for found in _BLOCK.finditer(text):
        yield text[: found.start(3)].count("\n") + 1, found[1], textwrap.dedent(found[3])


def setups(comments: str) -> list[str]:
    """Return the code of the comments `<!-- setup: CODE -->`."""
    return [textwrap.dedent(setup) for setup in re.findall(r"<!-- setup:\n(.*?)-->", comments, re.DOTALL)]


def recipe(heading: str) -> str:
    """Return the program under a heading of docs/recipes.md, with what the page's recipes share."""
    page = RECIPES.read_text()
    shared = setups(page)
    section = page.split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    (found,) = python_blocks(section)
    return "\n".join([*shared, found[2]])
