"""A run that is under way can be found by its user, and by nobody else; one that is over leaves nothing to be found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.core.errors import OptionError
from penstock.observe.live.live_snapshot import LiveSnapshot
from penstock.observe.live.status_file import StatusFile, active_runs, private_folder
from penstock.observe.meters import process_state
from penstock.observe.record.timeline import TimelinePoint


def snapshot(pid: int = 0) -> LiveSnapshot:
    return LiveSnapshot(pid=pid or os.getpid(), now=TimelinePoint(at_s=1.0, batches=3))


def test_a_run_is_found_until_it_ends(tmp_path: Path) -> None:
    own = StatusFile(tmp_path)
    own.write(snapshot())
    (found,) = active_runs(tmp_path)
    assert found.snapshot == snapshot()
    own.close()
    assert active_runs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_run_that_was_killed_is_removed_also_when_its_number_is_in_use_again(tmp_path: Path) -> None:
    own = StatusFile(tmp_path)
    own.write(snapshot())
    data = json.loads(own.path.read_text())
    own.path.write_text(json.dumps({**data, "start_ticks": data["start_ticks"] - 1}))
    (tmp_path / "1.json").write_text("half a f")
    assert active_runs(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert private_folder() == tmp_path / "penstock"
    assert private_folder().stat().st_mode & 0o777 == 0o700
    private_folder().chmod(0o755)
    with pytest.raises(OptionError, match="must be a folder that only this user can access"):
        private_folder()


def test_without_a_runtime_folder_the_temporary_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert private_folder() == tmp_path / f"penstock-{os.getuid()}"
    (tmp_path / f"penstock-{os.getuid()}").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"penstock-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="must be a folder that only this user can access"):
        private_folder()


def test_a_disk_that_is_full_does_not_disturb_the_run(tmp_path: Path) -> None:
    own = StatusFile(tmp_path / "gone")
    own.write(snapshot())
    own.close()


def test_a_process_that_has_ended_has_no_start() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process_state.start_ticks(child) is None
    os.waitpid(child, 0)
    assert process_state.start_ticks(child) is None
