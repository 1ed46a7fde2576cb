"""A Ray cluster on this machine alone: every "machine" of it is a node of one core, with processes of its own.

`python machines.py SOCKET` runs the cluster; scripts control it through `Machines`. Nothing listens beyond 127.0.0.1,
and nothing is reported anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import preloaded
import pytest
import ray_python

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what it says, on Linux: 127.0.0.1 stays 127.0.0.1
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",  # a forked agent's parent is the server of Pythons
}

_MODULES = (
    "aiohttp.web",
    "google.protobuf.json_format",
    "grpc.aio",
    "jsonschema",
    "msgpack",
    "psutil",
    "requests",
    "tqdm.auto",
    "yaml",
)
"""What Ray imports. Ray itself reads variables when it is imported that each of its processes has of its own."""

_NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20, "include_dashboard": False}

_HEARTBEATS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 6000,
    "health_check_failure_threshold": 3,
}
"""So that a machine that has gone is noticed after three seconds rather than fifteen, and a slow one is not."""


HOLDERS: set[int] = set()
"""Processes that serve all tests of a module; a test that checks for leaked processes ignores their children."""


class Machines:
    """Controls the cluster whose socket is at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def here(cls) -> Machines:
        """Return the cluster that this script was started for."""
        return cls(os.environ["MACHINES"])

    def ask(self, *words: Any) -> Any:
        """Send the holder a command, and return its answer."""
        with Client(self._path, "AF_UNIX") as connection:
            connection.send(words)
            return connection.recv()

    def have(self, count: int) -> list[str]:
        """Start or kill machines of one core until there are `count`; return their ids."""
        ids: list[str] = self.ask("have", count)
        return ids

    def have_at_least(self, count: int) -> list[str]:
        """Start machines until there are at least `count`; return their ids."""
        ids: list[str] = self.ask("have", count, False)
        return ids

    def kill(self, machine: str) -> None:
        """Kill all processes of a machine at once, so that nothing reports its end."""
        self.ask("kill", machine)

    def address(self) -> str:
        """Return the address of its head."""
        return str(self.ask("address"))

    def end(self) -> None:
        """Shut the cluster down."""
        self.ask("end")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of scripts that use a cluster of this machine, which is gone afterwards.

    All Python processes meanwhile, Ray's and those of the test, are forked from one that has imported torch and Ray.
    """
    modules = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "TMPDIR": str(folder), "PYTHONPATH": modules}
    # Ray's own folder: not where it would tell other programs of this cluster, and not too long for socket names.
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as home,
        (folder / "holder.log").open("wb") as log,
        contextlib.ExitStack() as stack,
    ):
        path = str(Path(home, "machines"))
        environment |= {"RAY_TMPDIR": home, "MACHINES": path}
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        preloaded.install(patch.setattr)
        server = preloaded.serving(HOLDERS, *_MODULES, environment=environment)
        environment[preloaded.SERVER] = stack.enter_context(server)
        holder = subprocess.Popen(
            [sys.executable, __file__, path], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        HOLDERS.add(holder.pid)
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"ready\n", (folder / "holder.log").read_text()
            machines = Machines(path)
            yield {**environment, "RAY_ADDRESS": machines.address()}
            machines.end()
        finally:
            holder.stdin.close()
            holder.stdout.close()
            holder.wait()
            HOLDERS.discard(holder.pid)


def main(path: str) -> None:
    """Run a cluster until the command "end", or the end of standard input."""
    from ray.cluster_utils import Cluster

    threading.Thread(target=_watch, daemon=True).start()
    sys.executable = ray_python.write(Path(path).parent)  # what Ray puts in the commands of its processes
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_log_monitor": False,
            "_system_config": _HEARTBEATS,
            **_NODE,
        },
    )
    commands = {
        "address": lambda: cluster.address,
        "kill": _kill,
        "have": _have,
        "end": cluster.shutdown,
    }
    with Listener(path, "AF_UNIX") as listener:
        print("ready", flush=True)
        command = ""
        while command != "end":
            with listener.accept() as connection:
                command, *rest = connection.recv()
                connection.send(commands[command](*([cluster, *rest] if rest else [])))


def _watch() -> None:
    """End with the process that started this one, so that Ray's processes end as well."""
    sys.stdin.read()
    os._exit(1)


def _have(cluster: Any, count: int, no_more: bool = True) -> list[str]:
    while no_more and len(cluster.worker_nodes) > count:
        _kill(cluster, next(iter(cluster.worker_nodes)).node_id)
    while len(cluster.worker_nodes) < count:
        cluster.add_node(num_cpus=1, **_NODE)
    return [node.node_id for node in cluster.worker_nodes]


def _kill(cluster: Any, machine: str) -> None:
    node = next(node for node in cluster.worker_nodes if node.node_id == machine)
    raylet = node.all_processes["raylet"][0].process
    for pid in (raylet.pid, *_children(raylet.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
