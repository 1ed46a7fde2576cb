"""Writes a file whole or not at all: who looks at it meanwhile sees the old one, or none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.core.errors import OptionError


def write_whole(file: Path, text: str, option: str) -> None:
    """Write `text` to `file`, which the user named by `option`.

    Raises:
        OptionError: it cannot be written there.
    """
    try:
        descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.")
        try:
            with open(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            Path(partial).chmod(0o644)
            Path(partial).replace(file)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as exc:
        why = os.strerror(exc.errno or 0)
        raise OptionError(f"{file} cannot be written: {why}; give another {option}") from exc
