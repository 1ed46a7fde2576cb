"""A worker process of a conversion: takes tasks from its socket, and sends progress and results back."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.core.errors import PenstockError, WorkerError
from penstock.feed.convert.tasks import Bench, Task, result_of


def main() -> None:
    """Work until the socket, whose descriptor is the last argument, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the conversion, which ends its workers
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[-1]))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, tasks), daemon=True).start()
    bench = Bench(lambda samples, nbytes: channel.send(("progress", (samples, nbytes))))
    while True:
        outcome = _outcome(tasks.get(), bench)
        try:
            channel.send(outcome)
        except OSError:  # nobody waits for it any more
            os._exit(0)


def _listen(channel: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    try:
        while True:
            tasks.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)  # in the middle of whatever it is: half a file counts for nothing


def _outcome(task: Task, bench: Bench) -> tuple[str, Any]:
    try:
        return "done", result_of(task, bench)
    except PenstockError as error:
        return "failed", error
    except Exception as error:  # noqa: BLE001 - where a worker ends
        failure = WorkerError(f"{type(error).__name__} during {type(task).__name__.lower()} {task.number}: {error}")
        failure.add_note(traceback.format_exc())
        return "failed", failure
