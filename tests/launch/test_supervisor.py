"""The process beside a run sees how the run ended."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

from penstock.launch.supervisor import _draw_until_end


def test_a_run_that_is_killed_before_it_has_read_an_answer_has_to_be_reported(tmp_path: Path) -> None:
    run = os.fork()
    if run == 0:
        os._exit(0)
    ended = os.pidfd_open(run)
    select.select([ended], [], [])
    ours, theirs = socket.socketpair()
    theirs.sendall(b"r")
    ours.close()  # the kernel resets a connection whose data nobody has read
    try:
        assert not _draw_until_end(run, ended, theirs, tmp_path / "status", None)
    finally:
        theirs.close()
        os.close(ended)
        os.waitpid(run, 0)
