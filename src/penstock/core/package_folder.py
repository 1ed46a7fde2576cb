"""Where penstock's own code lies, for what must tell it from the user's."""

from __future__ import annotations

from pathlib import Path

PACKAGE_FOLDER = str(Path(__file__).parents[1])
