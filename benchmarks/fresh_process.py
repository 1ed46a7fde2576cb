"""Run a measurement in a process that has loaded nothing before.

`forked` is a fork of the command's own process, which never opens a loader; `probe` is a new interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from benchmarks.adapters import OURS, TORCH
from benchmarks.served import PeerFailedError

TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent

T = TypeVar("T")


def forked(function: Callable[[], T]) -> T:
    """Call `function` in a fork of this process and return its result."""
    context = get_context("fork")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(answer, function))
    process.start()
    answer.close()
    try:
        found, error = answers.recv()
    except EOFError:
        found, error = None, "the process died"
    finally:
        process.join()
    if error:
        raise RuntimeError(f"measuring in a separate process failed: {error}")
    returned: T = found
    return returned


def _call(answer: Connection, function: Callable[[], T]) -> None:
    try:
        answer.send((function(), None))
    except Exception:  # noqa: BLE001  raised in the parent process
        answer.send((None, traceback.format_exc()))


def probe(adapter: str, *arguments: str) -> dict[str, float]:
    """Run `python -m benchmarks.probe ADAPTER ARGUMENTS` and return what it measured.

    Raises:
        PeerFailedError: A peer failed. When penstock or torch fails it is `RuntimeError`: then there is no result.
    """
    command = [sys.executable, "-m", "benchmarks.probe", adapter, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            out, errors = "", f"no answer in {TIMEOUT_S:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # descendants that it left behind
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0 and out:
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found
    kind = RuntimeError if adapter in (OURS.name, TORCH.name) else PeerFailedError
    raise kind(f"`{' '.join(command[1:])}` failed: {errors.strip()[-2000:]}")
