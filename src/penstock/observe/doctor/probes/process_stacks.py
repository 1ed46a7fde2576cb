"""Stacks of a running program and of its processes, read from outside by py-spy: the program is not stopped.

py-spy (https://github.com/benfred/py-spy) is a program of its own, from the package of that name.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ExtraError, PenstockError

RATE_PER_S = 25
"""How often each process is looked at."""

_STARTING_S = 60.0
"""What py-spy may take beside the time that it looks."""

_PROCESS = re.compile(r'process (\d+):"(.*)"$')
_THREAD = re.compile(r"thread \((\w+)\)")
_FRAME = re.compile(r"(?P<function>.+) \((?P<file>[^()]*):(?P<line>\d+)\)$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    function: str
    file: str
    """As the interpreter knows it: an absolute path, or a name in angle brackets."""

    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


Stack = tuple[Frame, ...]
"""The outermost call first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStacks:
    """What the main thread of one process was seen to do."""

    pid: int
    command: str
    counts: Mapping[Stack, int]
    """How often each stack was seen."""


def sample_stacks(pid: int, seconds: float) -> tuple[ProcessStacks, ...]:
    """Watch a process and its descendants for `seconds`; return what their main threads did, the process itself first.

    Raises:
        ExtraError: py-spy is not installed.
        PenstockError: there is no such Python program, it ended, or the system does not let this process look.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-stacks-") as folder:
        file = Path(folder) / "stacks.txt"
        asked = f"--pid {pid} --duration {max(1, round(seconds))} --rate {RATE_PER_S} --format raw"
        options = f"{asked} --subprocesses --idle --threads --full-filenames --nonblocking --output {file}"
        done = subprocess.run(
            [_program(), "record", *options.split()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + _STARTING_S,
            check=False,
        )
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = tuple(sorted(parse_stacks(text), key=lambda one: one.pid != pid))
    if not found or found[0].pid != pid:
        raise PenstockError(_failure(pid, done.stderr))
    return found


def parse_stacks(text: str) -> Iterator[ProcessStacks]:
    """Yield the main threads of what `py-spy record --format raw --threads --subprocesses` wrote: folded stacks."""
    counts: dict[int, Counter[Stack]] = {}
    commands: dict[int, str] = {}
    for line in text.splitlines():
        folded, _, count = line.rpartition(" ")
        parts = folded.split(";")
        processes = [found for part in parts if (found := _PROCESS.match(part))]
        threads = [found for part in parts if (found := _THREAD.match(part))]
        if not processes or not threads or not count.isdigit():
            continue
        pid = int(processes[-1][1])
        if _number(threads[-1][1]) != pid:  # the main thread has the number of its process
            continue
        frames = (found for part in parts if (found := _FRAME.match(part)))
        stack = tuple(Frame(one["function"], one["file"], int(one["line"])) for one in frames)
        counts.setdefault(pid, Counter())[stack] += int(count)
        commands[pid] = processes[-1][2]
    for pid, stacks in counts.items():
        yield ProcessStacks(pid=pid, command=commands[pid], counts=stacks)


def _number(text: str) -> int:
    return int(text, 0)


def _program() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise ExtraError('py-spy is needed to look into a running program: pip install "penstock[doctor]"')
    return program


def _failure(pid: int, said: str) -> str:
    error = next((line.removeprefix("Error: ") for line in said.splitlines() if line.startswith("Error: ")), "")
    reason = error.rstrip(".") or "no Python there, or it ended at once"
    return (
        f"process {pid} cannot be looked into ({reason}); it has to be a running Python program of this user; in a "
        "container, start that with --cap-add SYS_PTRACE; elsewhere, use sudo or set kernel.yama.ptrace_scope to 0"
    )
