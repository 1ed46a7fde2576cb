"""Runs programs plain and under `penstock run`, also on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from screen import Screen

LINES, COLUMNS = 24, 110

SLOW = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.zeros(10_000)

    loader = DataLoader(Slow(), batch_size=4, num_workers=2)
    for epoch in range(int(sys.argv[1])):
        for batch in loader:
            time.sleep(0.02)
        print("epoch", epoch, flush=True)
        if os.path.exists("enough"):
            break
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a script."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def python(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def penstock(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`."""
    return python(folder, "-m", "penstock", *command, **environment)


class Terminal:
    """A command on a terminal of 24 rows, and what a person sees of it."""

    def __init__(self, folder: Path, *command: str, columns: int = COLUMNS) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(slave)
        self.screen = Screen(LINES, columns)
        self._updates: Iterator[None] = iter(())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._master)
        self.process.kill()
        self.process.wait()

    def until(self, holds: Callable[[Screen], bool]) -> Screen:
        """Read until the screen is as it is wanted, however shortly, or everybody has closed the terminal."""
        while not holds(self.screen):
            for _ in self._updates:
                break
            else:
                piece = self._read()
                if not piece:
                    break
                self._updates = self.screen.updates(piece)
        return self.screen

    def end(self) -> tuple[list[str], int]:
        """Read to the end, and return all lines there were, and the exit code."""
        self.until(lambda screen: False)
        code = self.process.wait(60)
        return [line for line in self.screen.scrolled + self.screen.text() if line], code

    def _read(self) -> bytes:
        """Return what was written next; nothing when all others have closed the terminal."""
        assert select.select([self._master], [], [], 60)[0], "nothing for a minute\n" + "\n".join(self.screen.text())
        try:
            return os.read(self._master, 65536)
        except OSError:
            return b""


OnTerminal = Callable[..., Terminal]
"""Starts a command on a terminal, in the test's folder."""


def shows_panel(screen: Screen) -> bool:
    """Return whether the panel of a loop under way, of which batches were made, is there."""
    rate = screen.text()[-3]
    return "samples/s" in rate and " 0 samples/s" not in f" {rate}" and "host" in screen.text()[-1]


def is_given_back(screen: Screen) -> bool:
    """Return whether the whole terminal scrolls."""
    return (screen.top, screen.bottom) == (0, LINES - 1)
