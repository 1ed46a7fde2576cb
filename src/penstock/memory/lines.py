"""A line of the user's program, in words."""

from __future__ import annotations

import linecache
from pathlib import Path


def line_text(file: str, number: int) -> str:
    """Return where a line is and what it says: "train.py:31: loss = criterion(model(x), y)"."""
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}{f': {source}' if source else ''}"
