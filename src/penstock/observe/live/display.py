"""Draws the live panel on a terminal, for a run's supervisor and for `penstock watch`."""

from __future__ import annotations

import time

from penstock.observe.live.status_file import StatusRecord
from penstock.observe.live.terminal import StatusRows


class Display:
    """Draws snapshots in the bottom rows of the terminal on descriptor `fd`. Imports rich at the first one.

    Args:
        fd: the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._rows = StatusRows(fd)

    def show(self, status: StatusRecord) -> None:
        """Draw `status`, in as many rows as the terminal's current size allows."""
        from penstock.observe.live import panel

        size = self._rows.size()
        if size.columns:
            rows = panel.rows_for(size.columns, size.lines)
            age_s = max(0.0, time.time() - status.unix_s)
            self._rows.show(panel.render(status.snapshot, columns=size.columns, rows=rows, age_s=age_s))

    def close(self) -> None:
        """Release the rows."""
        self._rows.close()
