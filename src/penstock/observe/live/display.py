"""Draws the live panel on a terminal, for a run's supervisor and for `penstock watch`."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.observe.live.status_file import StatusRecord, ranks_of
from penstock.observe.live.straggler import Straggler, current_rank, find_straggler
from penstock.observe.live.terminal import StatusRows

_LEAST_LOST = 0.1
"""Of the loop's time, what a rank must cost the others to be named; as in the report."""

_ASK_PERIOD_S = 2.0
"""How often the other ranks' files are read: 64 take some 20 ms."""


class Display:
    """Draws snapshots in the bottom rows of the terminal on descriptor `fd`. Imports rich at the first one.

    Args:
        fd: the terminal.
        folder: of the status files, in which the other ranks' are.
    """

    def __init__(self, fd: int, folder: Path) -> None:
        self._rows = StatusRows(fd)
        self._folder = folder
        self._straggler: Straggler | None = None
        self._asked_s = 0.0

    def show(self, status: StatusRecord) -> None:
        """Draw `status`, in as many rows as the terminal's current size allows."""
        from penstock.observe.live import panel

        size = self._rows.size()
        if size.columns:
            rows = panel.rows_for(size.columns, size.lines)
            age_s = max(0.0, time.time() - status.unix_s)
            if status.snapshot.launch and time.monotonic() - self._asked_s >= _ASK_PERIOD_S:
                self._asked_s = time.monotonic()
                ranks = [current_rank(rank) for rank in ranks_of(self._folder, status.snapshot)]
                self._straggler = find_straggler(ranks, _LEAST_LOST)
            drawn = panel.render(
                status.snapshot, columns=size.columns, rows=rows, age_s=age_s, straggler=self._straggler
            )
            self._rows.show(drawn)

    def close(self) -> None:
        """Release the rows."""
        self._rows.close()
