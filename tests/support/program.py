"""A process that runs one piece of code after another, so that torch and Ray are imported only once.

Each piece runs in a new namespace with what the prelude has defined, and its classes are `__main__`'s, as a script's
are. Its answer is what it passes to `say`.
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

TIMEOUT_S = 300.0
"""Of a test that hangs: a loaded machine takes a minute to start a few processes that import torch."""


class Program:
    """The process at the other end of `connection`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, code: str) -> list[str]:
        """Run a piece of code and return its answer: a string for each call of `say`."""
        self._connection.send(textwrap.dedent(code))
        assert self._connection.poll(TIMEOUT_S), "the program does not answer"
        answer, failure = self._connection.recv()
        assert not failure, failure
        return list(answer)


@contextlib.contextmanager
def running(prelude: str, environment: dict[str, str], path: Path, started: set[int]) -> Iterator[Program]:
    """Yield a program that has run `prelude`; its process is in `started`, and is killed afterwards.

    Args:
        prelude: its first piece of code.
        environment: its environment variables.
        path: where to make a socket.
        started: the ids of processes that belong to no single test.
    """
    with Listener(str(path), "AF_UNIX") as listener:
        process = subprocess.Popen([sys.executable, __file__, str(path)], env=environment)
        started.add(process.pid)
        try:
            with listener.accept() as connection:
                program = Program(connection)
                program.run(prelude)
                yield program
        finally:
            process.kill()
            process.wait()
            started.discard(process.pid)


def main(path: str) -> None:
    """Run the code that is sent, until the connection is closed."""
    known: dict[str, object] = {"__name__": "__main__"}
    with Client(path, "AF_UNIX") as connection, contextlib.suppress(EOFError):
        _run_one(connection, known)
        while True:
            _run_one(connection, dict(known))
            gc.collect()


def _run_one(connection: Connection, names: dict[str, object]) -> None:
    code = connection.recv()
    answer: list[str] = []
    names["say"] = lambda *words: answer.append(" ".join(str(word) for word in words))
    failure = ""
    try:
        exec(compile(code, "<the test's code>", "exec"), names)
    except BaseException:
        failure = f"{traceback.format_exc()}\nanswer: {answer}"
    connection.send((answer, failure))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(sys.argv[1])
