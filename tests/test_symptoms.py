"""The errors that docs/symptoms.md explains are those of torch's loader, and penstock's does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

PAGE = (Path(__file__).parents[1] / "docs/symptoms.md").read_text()
COMMON = """
import os, resource, signal, sys, time, warnings
import torch, torch.utils.data
import penstock

class Rows(torch.utils.data.Dataset):
    def __init__(self): self.function = keep
    def __len__(self): return 400
    def __getitem__(self, index):
        if index == 3: bad()
        return torch.zeros(3 + (index == 1 and ragged))

ragged, options, keep = False, {{}}, None
def bad(): pass
{setup}
for DataLoader in (torch.utils.data.DataLoader, penstock.DataLoader):
    if os.path.exists("ONCE"):
        os.remove("ONCE")
    try:
        kept = list(DataLoader(Rows(), batch_size=2, **{{"num_workers": 1, **options}}))
        print(DataLoader.__module__.partition(".")[0], "made", len(kept))
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        print(DataLoader.__module__.partition(".")[0], type(error).__name__, error, notes)
"""
DESCRIPTORS = "warnings.simplefilter('ignore'); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
CASES = {
    "DataLoader worker (pid 1234) is killed by signal: Killed": (
        "def bad(): os.path.exists('ONCE') or (open('ONCE', 'x').close(), os.kill(os.getpid(), signal.SIGKILL))",
        r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)",
        "made 200",
    ),
    "Caught ValueError in DataLoader worker process 0": (
        "def bad(): raise ValueError('broken')",
        "Caught ValueError in DataLoader worker process 0",
        "ValueError.*sample 3",
    ),
    "stack expects each tensor to be equal size": (
        "ragged = True",
        "stack expects each tensor to be equal size",
        "stack expects each tensor to be equal size",
    ),
    "DataLoader timed out after 5 seconds": (
        "options = {'timeout': 1}\ndef bad(): time.sleep(3)",
        "DataLoader timed out after 1 seconds",
        "timed out.*sample 3",
    ),
    "Too many open files": (DESCRIPTORS, "Too many open files|received 0 items of ancdata", "made 200"),
    "received 0 items of ancdata": (DESCRIPTORS, "Too many open files|received 0 items of ancdata", "made 200"),
    "Can't pickle local object": (
        "options = {'multiprocessing_context': 'spawn'}\ndef outer(): return lambda: 0\nkeep = outer()",
        "Can't (pickle|get) local object",
        "function",
    ),
    "This DataLoader will create 64 worker processes in total": (
        "warnings.simplefilter('error'); options = {'num_workers': 64}",
        "This DataLoader will create 64 worker processes",
        "This DataLoader will create 64 worker processes",
    ),
}


@pytest.mark.parametrize("heading", CASES)
def test_torchs_loader_gives_the_error_and_penstocks_does_what_the_page_says(heading: str, tmp_path: Path) -> None:
    assert re.search(rf"^## .*{re.escape(heading)}", PAGE, re.MULTILINE)
    setup, torchs, ours = CASES[heading]
    code = COMMON.format(setup=setup).replace("ONCE", str(tmp_path / "once"))
    done = run(code)
    theirs, _, after = done.stdout.partition("penstock ")
    assert re.search(torchs, theirs, re.DOTALL), done.stdout + done.stderr
    assert re.search(ours, after, re.DOTALL), done.stdout + done.stderr
