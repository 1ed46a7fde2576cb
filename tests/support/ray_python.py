"""What Ray runs in place of Python on the machines of a test: it has the server of preloaded.py fork the process.

A worker of Ray is two starts of Python with Ray imported, and imports torch for its actor; a machine has two agents in
Python besides. This file starts without site and imports little. It ends when the process that was forked for it does,
and that process when this one is killed.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from pathlib import Path

SERVER = "PENSTOCK_TESTS_PYTHON_SERVER"  # preloaded.SERVER, whose import takes longer than all of this
_CONTEXT = "--serialized-runtime-env-context="


def write(folder: Path) -> str:
    """Write this file as a program into `folder`, and return its path."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable} -ISE\n{Path(__file__).read_text()}")
    path.chmod(stat.S_IRWXU)
    return str(path)


def main(words: list[str]) -> int:
    """Have the server run the Python program `words`; return its exit code."""
    words = [word for word in words if word != "-u"]
    environment = dict(os.environ)
    if words[0].endswith("setup_worker.py"):  # it would start a shell, and that Python again
        (context,) = (word.removeprefix(_CONTEXT) for word in words if word.startswith(_CONTEXT))
        environment |= json.loads(context).get("env_vars", {})
        words = [word for word in words[1:] if not word.startswith((_CONTEXT, "--language"))]
    request = {
        "command": words,
        "cwd": os.getcwd(),
        "environment": environment,
        "descriptors": [0, 1, 2],
        "new_session": False,
        "group": None,
        "ends_with_asker": True,
    }
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(environment[SERVER])
        socket.send_fds(server, [struct.pack("!I", len(body))], [0, 1, 2])
        server.sendall(body)
        answer = server.recv(8, socket.MSG_WAITALL)  # its process number and its status
    return os.waitstatus_to_exitcode(struct.unpack("!ii", answer)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) & 0xFF)
