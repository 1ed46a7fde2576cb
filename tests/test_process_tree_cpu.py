"""The CPU time that benchmarks count: of processes, whichever of their threads are still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # the benchmarks are not part of the package

from benchmarks.process_tree_cpu import cpu_s

PROGRAM = """
import threading, time

def compute():
    while time.thread_time() < 0.2:
        pass

thread = threading.Thread(target=compute)
thread.start()
thread.join()
print("computed", flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has clocks of other processes")
def test_threads_of_a_child_that_have_ended_are_counted() -> None:
    before = cpu_s()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"computed\n"
        assert cpu_s() - before >= 0.2
        child.communicate(b"\n")
    assert cpu_s() - before >= 0.2  # of a child that was waited for, too
