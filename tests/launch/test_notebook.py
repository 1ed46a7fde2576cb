"""In the real IPython: `%load_ext penstock` replaces torch's DataLoader, `%penstock` reports, unloading undoes it."""

from __future__ import annotations

import re
from pathlib import Path

from launch.programs import python, script

CELLS = """
    import torch
    from torch.utils.data import DataLoader
    print("before", DataLoader.__module__)
    %load_ext penstock
    print("loaded", DataLoader.__module__, torch.utils.data.DataLoader.__module__)
    print(sum(len(batch) for batch in DataLoader(torch.arange(10.0), batch_size=5, num_workers=1)))
    %penstock
    %unload_ext penstock
    print("unloaded", DataLoader.__module__, torch.utils.data.DataLoader.__module__)
    %load_ext penstock
    print("again", DataLoader.__module__)
"""
TORCHS, OURS = "torch.utils.data.dataloader", "penstock.loader.dataloader"


def notebook(folder: Path, cells: str) -> str:
    path = script(folder, cells, "cells.ipy")
    done = python(
        folder, "-m", "IPython", "--no-banner", "--colors=NoColor", path.name, IPYTHONDIR=str(folder / "ipython")
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_extension_replaces_the_loader_reports_and_puts_it_back(tmp_path: Path) -> None:
    shown = notebook(tmp_path, CELLS)
    assert f"before {TORCHS}\nloaded {OURS} {OURS}\n10\n" in shown
    assert "s since it was loaded" in shown
    assert re.search(r"Tensor \(In\[1\]:\d+\): 10 samples in 2 batches", shown)
    assert f"unloaded {TORCHS} {TORCHS}\nagain {OURS}\n" in shown


def test_torch_may_be_imported_later(tmp_path: Path) -> None:
    cells = """
        %load_ext penstock
        import sys
        print("torch" in sys.modules)
        from torch.utils.data import DataLoader
        print(DataLoader.__module__)
    """
    assert notebook(tmp_path, cells) == f"False\n{OURS}\n"


def test_unloading_before_torch_is_imported_leaves_nothing(tmp_path: Path) -> None:
    cells = """
        %load_ext penstock
        %unload_ext penstock
        from torch.utils.data import DataLoader
        print(DataLoader.__module__)
    """
    assert notebook(tmp_path, cells) == f"{TORCHS}\n"
