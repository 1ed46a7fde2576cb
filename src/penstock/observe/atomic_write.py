"""write_text_atomic: write a file wholly or not at all. A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.core.errors import OptionError


def write_text_atomic(file: Path, text: str, option: str) -> None:
    """Write `text` to `file`, which the user named by `option`.

    Raises:
        OptionError: the file cannot be written.
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
        reason = os.strerror(exc.errno or 0)
        raise OptionError(f"{file} cannot be written: {reason}; pass another {option}") from exc
