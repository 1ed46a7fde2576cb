"""write_text_atomic: write a file wholly or not at all. A reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from penstock.core.errors import OptionError


def write_text_atomic(file: Path, text: str, option: str) -> None:
    """Write `text` to `file`, which the user named by `option`.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        partial = file.parent / f".{file.name[:100]}.{secrets.token_hex(8)}"
        # As any new file: readable as the umask and the folder's own rules say.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            partial.replace(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as exc:
        reason = os.strerror(exc.errno or 0)
        raise OptionError(f"{file} cannot be written: {reason}; pass another {option}") from exc
