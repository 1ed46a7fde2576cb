"""The tests' preloaded Pythons (support/preloaded.py) can be signalled as processes of one's own can."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_a_process_leads_its_session_once_it_is_started() -> None:
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_process_can_be_signalled_until_its_end_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"], start_new_session=True)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 3


def test_a_process_whose_asker_has_gone_is_reaped() -> None:
    asker = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import os; os._exit(0)']).pid)"
    ran = subprocess.run([sys.executable, "-c", asker], stdout=subprocess.PIPE, text=True, check=True)
    while Path(f"/proc/{int(ran.stdout)}").exists():
        os.sched_yield()


def test_asking_for_a_process_leaves_no_socket_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def interrupted(connection: socket.socket, count: int) -> bytes:
        asked.append(connection)
        raise KeyboardInterrupt

    monkeypatch.setattr(preloaded, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subprocess.Popen([sys.executable, "-c", "pass"])
    assert asked[0].fileno() == -1
