"""The panel on a terminal: what the keeper of a run draws, and `penstock watch`."""

from __future__ import annotations

import time

from penstock.observe.beacon import Sighting
from penstock.observe.terminal import StatusRows


class Display:
    """Shows pulses in rows at the bottom of the terminal on descriptor `fd`. rich is imported with the first."""

    def __init__(self, fd: int) -> None:
        self._rows = StatusRows(fd)

    def show(self, sighting: Sighting) -> None:
        """Draw, in as many rows as the terminal's size allows now."""
        from penstock.observe import panel

        size = self._rows.size()
        if size.columns:
            rows = panel.rows_for(size.columns, size.lines)
            age_s = max(0.0, time.time() - sighting.at)
            self._rows.show(panel.render(sighting.pulse, columns=size.columns, rows=rows, age_s=age_s))

    def close(self) -> None:
        """Give the rows back."""
        self._rows.close()
