"""What a run writes while it runs, in an order that lets nobody see more than a report would have."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from penstock.core.ranks import Ranks
from penstock.launch.live_output import LiveOutput
from penstock.launch.rank_files import RankFiles
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.timeline import TimelinePoint


def test_the_first_batch_is_saved_when_it_is_seen_however_lately_the_record_was(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, Ranks())
    record = RunRecord(command=("x",), wall_s=0.5, started="2026-01-01T00:00:00+00:00", started_unix_ns=1)
    files.begin(record)
    batches = 0
    output = LiveOutput(None, files, lambda: replace(record, command=(str(batches),)), prints_lines=False)
    for at_s, batches in ((0.5, 0), (1.0, 0), (1.5, 2), (2.0, 5)):
        output.write(LiveSnapshot(pid=os.getpid(), now=TimelinePoint(at_s=at_s, batches=batches)))
    killed = files.end(None).record
    assert killed is not None
    assert killed.command == ("2",)
