"""Penstock in a notebook: `%load_ext penstock`, `%penstock`, `%unload_ext penstock`.

Source: IPython's documentation, "Writing extensions": `load_ipython_extension(ipython)` and its counterpart.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time
from typing import Any

from penstock import __version__
from penstock.core.host import usable_cores
from penstock.launch.substitute import put_torch_loader_back, replace_torch_loader
from penstock.observe import report
from penstock.observe.host_memory import MemoryMeter
from penstock.observe.record import RunRecord
from penstock.observe.watch import Watch

_loaded: list[Notebook] = []


class Notebook:
    """One notebook whose loaders are watched.

    Args:
        ipython: its `InteractiveShell`.
    """

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._watch = Watch()
        self._notice = self._watch.notice  # one object, to be recognised when it is taken away
        self._memory = MemoryMeter()

    def load(self) -> None:
        """Put penstock's DataLoader in the place of torch's, also under names that the notebook has given it."""
        self._began = time.perf_counter()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        replace_torch_loader(self._notice)
        self._rename(to_penstock=True)
        self._ipython.register_magic_function(self.show, "line", "penstock")

    def unload(self) -> None:
        """Put torch's back. Loaders that were made meanwhile stay penstock's."""
        self._rename(to_penstock=False)
        put_torch_loader_back(self._notice)
        self._ipython.magics_manager.magics["line"].pop("penstock", None)

    def show(self, line: str = "") -> None:
        """Print the report so far (`%penstock`)."""
        self._memory.look()
        record = self.record()
        print(f"penstock: {record.wall_s:.1f} s since it was loaded")
        print(report.render(record).partition("\n")[2], end="")

    def record(self) -> RunRecord:
        """Return what has been counted since the extension was loaded."""
        return RunRecord(
            command=("notebook",),
            started=self._started,
            wall_s=time.perf_counter() - self._began,
            versions={"penstock": __version__, "python": platform.python_version()},
            cpus=usable_cores(),
            memory=self._memory.peak(),
            loaders=tuple(loader.record() for loader in self._watch.loaders),
        )

    def _rename(self, *, to_penstock: bool) -> None:
        """Have names in the notebook that mean one class mean the other; there are none before torch is imported."""
        if "penstock.feed.loader" not in sys.modules:
            return
        from penstock.feed.loader import DataLoader

        torchs = DataLoader.__base__
        old, new = (torchs, DataLoader) if to_penstock else (DataLoader, torchs)
        names = self._ipython.user_ns
        for name in [name for name, value in names.items() if value is old and not name.startswith("_")]:
            names[name] = new


def load(ipython: Any) -> None:
    """Do what `%load_ext penstock` asks for."""
    notebook = Notebook(ipython)
    notebook.load()
    _loaded.append(notebook)


def unload(ipython: Any) -> None:
    """Do what `%unload_ext penstock` asks for."""
    while _loaded:
        _loaded.pop().unload()
