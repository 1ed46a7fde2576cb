"""The files of ranks end as one report, whichever rank ends last."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from penstock.core.ranks import Ranks
from penstock.launch.rank_files import RankFiles
from penstock.observe.record.run_record import RunRecord


def files_of(folder: Path, rank: int, world: int) -> RankFiles:
    ranks = Ranks(rank=rank, world_size=world, local_rank=rank, local_world_size=world, launch="one")
    return RankFiles(folder, ranks)


def killed(folder: Path, rank: int, world: int, *, has_saved: bool = True) -> None:
    """Begin a rank, and save its record, in a process that then ends without a word."""
    child = os.fork()
    if child == 0:
        try:
            files = files_of(folder, rank, world)
            started = time.time_ns() - 10**9
            record = RunRecord(command=("x",), wall_s=0.5, started="2026-01-01T00:00:00+00:00", started_unix_ns=started)
            files.begin(record)
            if has_saved:
                files.save(replace(record, command=("x", "saved")))
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_a_rank_that_is_killed_before_it_loads_anything_is_reported(tmp_path: Path) -> None:
    for rank in range(2):
        killed(tmp_path, rank, 2, has_saved=False)
    record = files_of(tmp_path, 0, 2).end(None).record
    assert record is not None
    assert record.command == ("x",)
    assert [rank.missing_reason[:13] for rank in record.ranks] == ["it was killed"] * 2


def test_a_run_that_begins_leaves_the_files_of_a_killed_one_to_its_supervisor(tmp_path: Path) -> None:
    killed(tmp_path, 0, 1)
    other = RankFiles(tmp_path, Ranks(launch="two"))
    said, says = os.pipe()
    dismissed, dismisses = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        files_of(tmp_path, 0, 1).keep()
        os.write(says, b"k")
        os.read(dismissed, 1)
        os._exit(0)
    os.read(said, 1)
    other.begin()
    assert files_of(tmp_path, 0, 1).end(None).record is not None
    os.write(dismisses, b"d")
    os.waitpid(supervisor, 0)
    for end in (said, says, dismissed, dismisses):
        os.close(end)
    other.begin()
    assert [folder.name for folder in tmp_path.iterdir()] == ["ranks-two"]


def test_of_ranks_that_are_killed_together_one_reports_and_has_all_of_them(tmp_path: Path) -> None:
    for rank in range(3):
        killed(tmp_path, rank, 3)
    first = files_of(tmp_path, 1, 3).end(None)  # as the supervisors do, in any order
    assert first.is_last
    assert first.record is not None
    assert first.record.error is not None
    assert first.record.error.startswith("rank 1: it was killed")
    assert first.record.ranks[1].wall_s >= 1.0  # until it was noticed, not until it saved
    assert [rank.missing_reason[:13] for rank in first.record.ranks] == ["it was killed"] * 3
    for rank in (0, 2):
        other = files_of(tmp_path, rank, 3).end(None)
        assert (other.record, other.is_last) == (None, False)
    files_of(tmp_path, 1, 3).remove()
    late = files_of(tmp_path, 0, 3).end(None)
    assert late.record is None
    files_of(tmp_path, 0, 3).remove()
    assert not list(tmp_path.iterdir())


def test_the_report_of_a_rank_that_is_killed_while_it_writes_it_is_written_by_its_supervisor(tmp_path: Path) -> None:
    killed(tmp_path, 1, 2)
    files = files_of(tmp_path, 0, 2)
    record = RunRecord(command=("x",), wall_s=1.0, exit_code=1, started="2026-01-01T00:00:00+00:00", started_unix_ns=0)
    files.begin(record)
    begun = files.end(record)
    assert begun.is_last
    other = files_of(tmp_path, 1, 2).end(None)
    assert (other.record, other.is_last) == (None, False)
    assert files_of(tmp_path, 0, 2).end(None) == begun
