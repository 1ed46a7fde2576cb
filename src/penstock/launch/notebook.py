"""The IPython extension: `%load_ext penstock`, `%penstock`, `%unload_ext penstock`.

Source: IPython's documentation, "Writing extensions": `load_ipython_extension(ipython)` and its counterpart.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from penstock import __version__
from penstock.core.host import usable_cores
from penstock.core.urls import shown
from penstock.launch.patch_torch import TorchPatch
from penstock.observe.live.loader_registry import LoaderRegistry
from penstock.observe.meters.clock import read_clock
from penstock.observe.meters.host_memory import MemoryMeter
from penstock.observe.record.run_record import RunRecord
from penstock.observe.report import text_report

_loaded_notebooks: list[Notebook] = []


class Notebook:
    """A notebook that uses penstock's DataLoader.

    Args:
        ipython: its `InteractiveShell`.
    """

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython
        self._registry = LoaderRegistry()
        self._patch = TorchPatch(self._registry)
        self._memory = MemoryMeter()
        self._clock = read_clock()

    def load(self) -> None:
        """Replace torch's DataLoader by penstock's, also under names that the notebook has given it."""
        self._patch.install()
        self._rename(to_penstock=True)
        self._ipython.register_magic_function(self.show, "line", "penstock")

    def unload(self) -> None:
        """Restore torch's DataLoader. Loaders created meanwhile stay penstock's."""
        self._rename(to_penstock=False)
        self._patch.remove()
        self._ipython.magics_manager.magics["line"].pop("penstock", None)

    def show(self, line: str = "") -> None:
        """Print the report so far: `%penstock`."""
        self._memory.measure()
        record = self.record()
        print(f"penstock: {record.wall_s:.1f} s since it was loaded")
        print(shown(text_report.render(record, details=False)).partition("\n")[2], end="")

    def record(self) -> RunRecord:
        """Return the record since the extension was loaded."""
        return RunRecord(
            command=("notebook",),
            started=self._clock.iso_time(),
            started_unix_ns=self._clock.unix_ns,
            wall_s=self._clock.elapsed_s(),
            versions={"penstock": __version__, "python": platform.python_version()},
            cpus=usable_cores(),
            memory=self._memory.peak(),
            loaders=self._registry.records(),
        )

    def _rename(self, *, to_penstock: bool) -> None:
        """Rebind the notebook's names of one class to the other; there are none before torch is imported."""
        if "penstock.loader.dataloader" not in sys.modules:
            return
        from penstock.loader.dataloader import DataLoader

        torch_loader = DataLoader.__base__
        old, new = (torch_loader, DataLoader) if to_penstock else (DataLoader, torch_loader)
        names = self._ipython.user_ns
        for name in [name for name, value in names.items() if value is old and not name.startswith("_")]:
            names[name] = new


def load(ipython: Any) -> None:
    """Load the extension: `%load_ext penstock`."""
    notebook = Notebook(ipython)
    notebook.load()
    _loaded_notebooks.append(notebook)


def unload(ipython: Any) -> None:
    """Unload the extension: `%unload_ext penstock`."""
    while _loaded_notebooks:
        _loaded_notebooks.pop().unload()
