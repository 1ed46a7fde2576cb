"""For `make quick`: a test that starts a process or opens a port is left to `make test`, at the moment it does.

So nobody has to say which tests are quick: a new one that only computes is run, whatever its file or folder.
"""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import subprocess
from typing import Any, NoReturn

import pytest

_bind = socket.socket.bind


class Stops:
    """Stops a test at its first process or port."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stop tests at the first process and the first port, until `patch` is undone."""
        patch.setattr(os, "fork", self._stop)
        patch.setattr(subprocess.Popen, "_execute_child", self._stop)
        patch.setattr(multiprocessing.util, "spawnv_passfds", self._stop)
        patch.setattr(socket.socket, "bind", lambda own, address: self._bind(own, address))

    def _stop(self, *_: Any, **__: Any) -> NoReturn:
        pytest.skip("starts a process")

    def _bind(self, own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6):
            self._stop()
        _bind(own, address)
