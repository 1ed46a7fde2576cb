"""A stand-in for SLURM: `srun`, `scancel` and `scontrol` for a job script, with all its nodes on this machine.

The three commands are programs in a folder at the head of PATH. They ask the process of the test, which starts a step's
tasks as a node's daemon does: with SLURM_PROCID and the like, signalled by `scancel`, and waited for by `srun`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_COMMAND = """#!{python} -IS
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({path!r})
asked = {{"words": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "environment": dict(os.environ), "cwd": os.getcwd()}}
connection.sendall(json.dumps(asked).encode())
connection.shutdown(socket.SHUT_WR)
answer = json.load(connection.makefile())
print(answer["said"], end="")
sys.exit(answer["code"])
"""

JOB = "7"


class Slurm:
    """A cluster on this machine, whose jobs are scripts.

    Args:
        folder: where the commands are put; short, since a socket is there, too.
    """

    def __init__(self, folder: Path) -> None:
        self.requeued: list[str] = []
        """The jobs that `scontrol requeue` was asked for."""
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        self._nodes, self._per_node = 1, 1
        self._log = Path(os.devnull)
        path = str(folder / "socket")
        for name in ("srun", "scancel", "scontrol"):
            (folder / name).write_text(_COMMAND.format(python=sys.executable, path=path))
            (folder / name).chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop answering."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def sbatch(self, script: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a job script in its folder."""
        options = dict(re.findall(r"--(nodes|ntasks-per-node)=(\d+)", script.read_text()))
        self._nodes, self._per_node = int(options["nodes"]), int(options["ntasks-per-node"])
        path = f"{self._folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": JOB, "SLURM_JOB_NUM_NODES": str(self._nodes)}
        self._log = log
        with log.open("ab") as file:
            return subprocess.Popen(
                ["bash", script.name], cwd=script.parent, env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._answer, args=(connection,)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as file:
            asked = json.load(file)
            command, *words = asked["words"]
            said, code = "", 0
            if command == "srun":
                code = self._srun(words, asked)
            elif command == "scancel":
                number = signal.Signals[f"SIG{words[0].removeprefix('--signal=')}"]
                assert words[1:] == [f"{JOB}.0"], words
                for task in self._tasks:
                    task.send_signal(number)
            elif words == ["show", "hostnames"]:
                said = "127.0.0.1\n" * self._nodes
            else:
                assert words[0] == "requeue", words
                self.requeued.append(words[1])
            connection.sendall(json.dumps({"said": said, "code": code}).encode())

    def _srun(self, words: list[str], asked: dict[str, Any]) -> int:
        """Run a step, and return the largest exit code of its tasks."""
        command = [sys.executable, "-m", "torch.distributed.run", *words[1:]] if words[0] == "torchrun" else words
        environment = {**asked["environment"], "SLURM_NTASKS": str(self._nodes * self._per_node), "SLURM_STEP_ID": "0"}
        self._tasks = []
        with self._log.open("ab") as log:
            for number in range(self._nodes * self._per_node):
                node, local = divmod(number, self._per_node)
                own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
                started = subprocess.Popen(
                    command, cwd=asked["cwd"], env={**environment, **own}, stdout=log, stderr=subprocess.STDOUT
                )
                self._tasks.append(started)
        return max(task.wait() for task in self._tasks)
