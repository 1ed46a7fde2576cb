"""What a run writes while it runs: its status file, progress lines on stderr, and its record so far."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from penstock.launch.rank_files import RankFiles
from penstock.observe.live import live_text
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.status_file import StatusFile
from penstock.observe.record.run_record import RunRecord

_STDERR = 2
_LINE_PERIOD_S = 5.0
_SAVE_PERIOD_S = 2.0
_SAVE_TIME_FRACTION = 1 / 2000
"""Saving the record for the case that this process is killed takes at most this fraction of its time."""


class LiveOutput:
    """Writes each snapshot of a run. Used by the poller's thread.

    Args:
        status_file: replaced at every snapshot; None to write none.
        rank_files: get the record so far; None to save none.
        current_record: returns the record so far.
        prints_lines: whether to print a progress line every five seconds.
    """

    def __init__(
        self,
        status_file: StatusFile | None,
        rank_files: RankFiles | None,
        current_record: Callable[[], RunRecord],
        *,
        prints_lines: bool,
    ) -> None:
        self._status_file = status_file
        self._rank_files = rank_files
        self._current_record = current_record
        self._prints_lines = prints_lines
        self._next_line_s = _LINE_PERIOD_S
        self._next_save_s = 0.0
        self._saved_batches = 0

    def write(self, snapshot: LiveSnapshot) -> None:
        """Write what is due."""
        at_s = snapshot.now.at_s
        # Before what a person sees: whoever stops the run on seeing a batch gets a report that has one.
        is_first = snapshot.now.batches > 0 == self._saved_batches
        if self._rank_files is not None and (at_s >= self._next_save_s or is_first):
            began = time.thread_time()  # not what it waited for a core or the GIL
            self._rank_files.save(self._current_record())
            took_s = time.thread_time() - began
            self._saved_batches = snapshot.now.batches
            self._next_save_s = at_s + max(_SAVE_PERIOD_S, took_s / _SAVE_TIME_FRACTION)
        if self._status_file is not None:
            self._status_file.write(snapshot)
        if self._prints_lines and at_s >= self._next_line_s and snapshot.loader:
            self._next_line_s = at_s + _LINE_PERIOD_S
            # os.write, not print: a fork could copy a locked stream. An error means that nobody reads the log.
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"penstock: {live_text.progress_line(snapshot)}\n".encode())
