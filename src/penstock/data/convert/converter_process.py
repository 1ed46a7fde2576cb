"""The main function of a worker process: receives tasks on its socket, and sends progress and results back."""

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
from penstock.data.convert.task import Task, TaskContext, run_task


def main() -> None:
    """ConversionRun until the socket, whose descriptor is the last argument, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the conversion, which stops its workers
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[-1]))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, tasks), daemon=True).start()
    context = TaskContext(lambda samples, nbytes: channel.send(("progress", (samples, nbytes))))
    while True:
        outcome = _outcome(tasks.get(), context)
        try:
            channel.send(outcome)
        except OSError:  # the conversion has ended
            os._exit(0)


def _listen(channel: Connection, tasks: queue.SimpleQueue[Task]) -> None:
    try:
        while True:
            tasks.put(channel.recv())
    except (EOFError, OSError):
        os._exit(0)  # also in the middle of a task: an incomplete file is discarded later


def _outcome(task: Task, context: TaskContext) -> tuple[str, Any]:
    try:
        return "done", run_task(task, context)
    except PenstockError as error:
        return "failed", error
    except Exception as error:  # noqa: BLE001 - where a worker ends
        failure = WorkerError(f"{type(error).__name__} while {task.action} {task.number}: {error}")
        failure.add_note(traceback.format_exc())
        return "failed", failure
