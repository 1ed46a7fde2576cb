"""A program that stays: runs one piece of code after another, so that torch and Ray are imported once for all of them.

Each piece finds what the prelude has defined, in a namespace of its own, and its classes are `__main__`'s, as a
script's are. What it hands to `say` is its answer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

TIMEOUT_S = 100.0


class Program:
    """The program at the other end of `line`."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def run(self, code: str) -> list[str]:
        """Run a piece of code and return what it said, a string for each call of `say`."""
        self._line.send(textwrap.dedent(code))
        assert self._line.poll(TIMEOUT_S), "the program does not answer"
        said, failure = self._line.recv()
        assert not failure, failure
        return list(said)


@contextlib.contextmanager
def running(prelude: str, environment: dict[str, str], path: Path, started: set[int]) -> Iterator[Program]:
    """Yield a program that has run `prelude`, and whose number is in `started`; it is gone afterwards.

    Args:
        prelude: its first piece of code.
        environment: its environment variables.
        path: where there is to be a socket.
        started: the process numbers of what belongs to no single test.
    """
    with Listener(str(path), "AF_UNIX") as listener:
        process = subprocess.Popen([sys.executable, __file__, str(path)], env=environment)
        started.add(process.pid)
        try:
            with listener.accept() as line:
                program = Program(line)
                program.run(prelude)
                yield program
        finally:
            process.kill()
            process.wait()
            started.discard(process.pid)


def main(path: str) -> None:
    """Run what is sent until nobody sends any more."""
    known: dict[str, object] = {"__name__": "__main__"}
    with Client(path, "AF_UNIX") as line, contextlib.suppress(EOFError):
        _one(line, known)
        while True:
            _one(line, dict(known))
            gc.collect()


def _one(line: Connection, names: dict[str, object]) -> None:
    code = line.recv()
    said: list[str] = []
    names["say"] = lambda *words: said.append(" ".join(str(word) for word in words))
    failure = ""
    try:
        exec(compile(code, "<the test's code>", "exec"), names)
    except BaseException:
        failure = f"{traceback.format_exc()}\nsaid: {said}"
    line.send((said, failure))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(sys.argv[1])
