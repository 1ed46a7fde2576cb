"""The errors that docs/symptoms.md explains are those of torch's loader, and penstock's does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run

import penstock
from penstock.device import Sim
from penstock.device.base import TensorSpec

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

ragged, options, for_penstock, keep = False, {{}}, {{}}, None
def bad(): pass
{setup}
for DataLoader in (torch.utils.data.DataLoader, penstock.DataLoader):
    if os.path.exists("ONCE"):
        os.remove("ONCE")
    try:
        more = for_penstock if DataLoader is penstock.DataLoader else {{}}
        kept = list(DataLoader(Rows(), batch_size=2, **{{"num_workers": 1, **options, **more}}))
        print(DataLoader.__module__.partition(".")[0], "made", len(kept))
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        print(DataLoader.__module__.partition(".")[0], type(error).__name__, error, notes)
"""
DESCRIPTORS = "warnings.simplefilter('ignore'); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
ONCE = "def bad(): os.path.exists('ONCE') or (open('ONCE', 'x').close(), {0})"
ACCELERATOR = """
class Accelerator:  # stands in for one whose host memory is pinned already
    is_available = staticmethod(lambda: True)
    current_accelerator = staticmethod(lambda: torch.device("cuda"))
    current_device_index = set_device_index = staticmethod(lambda *_: 0)
torch.Tensor.pin_memory, torch.accelerator = lambda tensor: tensor, Accelerator
options, for_penstock = {"pin_memory": True}, {"pin_memory": False, "device": "sim"}
"""
STREAM = """
warnings.filterwarnings("error", "Length of")
class Rows(torch.utils.data.IterableDataset):
    def __len__(self): return 3
    def __iter__(self): return iter(torch.zeros(3, 3))
options = {"num_workers": 2}
def list(loader): return [batch for length in [len(loader)] for batch in loader]
"""
CASES = {
    "DataLoader worker (pid 1234) is killed by signal: Killed": (
        ONCE.format("os.kill(os.getpid(), signal.SIGKILL)"),
        r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)",
        "made 200",
    ),
    "DataLoader worker (pid(s) 1234) exited unexpectedly": (
        ONCE.format("os._exit(1)"),
        r"DataLoader worker \(pid.*\) exited unexpectedly",
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
    "Trying to resize storage that is not resizable": (
        "Rows.__getitem__ = lambda self, index: torch.zeros(4 if index == 2 else 3)",
        "RuntimeError: Trying to resize storage that is not resizable",
        r"stack expects each tensor to be equal size, but got \[4\] at entry 0 and \[3\] at entry 1",
    ),
    "default_collate: batch must contain tensors": (
        "Rows.__getitem__ = lambda self, index: None if index == 2 else torch.zeros(3)",
        "default_collate: batch must contain tensors, .*; found <class 'NoneType'>",
        "default_collate: batch must contain tensors, .*; found <class 'NoneType'>",
    ),
    "The given NumPy array is not writable": (
        "import numpy; row = numpy.zeros(3); row.flags.writeable = False; warnings.simplefilter('error')\n"
        "Rows.__getitem__ = lambda self, index: row",
        "The given NumPy array is not writable",
        "made 200",
    ),
    "Length of IterableDataset was reported to be 1000 but 1001 samples have been fetched": (
        STREAM,
        "Length of IterableDataset .* was reported to be 3.* but 4 samples have been fetched",
        "Length of IterableDataset .* was reported to be 3.* but 4 samples have been fetched",
    ),
    "Too many open files": (DESCRIPTORS, "Too many open files|received 0 items of ancdata", "made 200"),
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
    "Cannot re-initialize CUDA in forked subprocess": (  # the state that a fork leaves behind is simulated
        "main = os.getpid(); torch.cuda._is_in_bad_fork = lambda: os.getpid() != main\ndef bad(): torch.cuda.init()",
        "Cannot re-initialize CUDA in forked subprocess",
        "Cannot re-initialize CUDA in forked subprocess.*sample 3",
    ),
    "Pin memory thread exited unexpectedly": (
        DESCRIPTORS + ACCELERATOR,
        "Pin memory thread exited unexpectedly",
        "made 200",
    ),
    "received 0 items of ancdata": (  # which ends that thread: where the loop itself receives, torch names the limit
        DESCRIPTORS + ACCELERATOR,
        "Pin memory thread exited unexpectedly.*RuntimeError: received 0 items of ancdata",
        "made 200",
    ),
}
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh")
WITHOUT_GUARD = """
import torch.utils.data, penstock

for loader in (torch.utils.data.DataLoader, penstock.DataLoader):
    try:
        list(loader([1.0] * 8, num_workers=1, multiprocessing_context="spawn"))
    except RuntimeError:
        if __name__ != "__main__":
            raise
        print(loader.__name__, "caught")
"""
TOO_SMALL = """
import os, sys

class PagingFile:
    def find_spec(self, name, *_):
        if name == "torch" and os.environ.get("MAIN", str(os.getpid())) != str(os.getpid()):
            raise OSError("[WinError 1455] The paging file is too small for this operation to complete")

sys.meta_path.insert(0, PagingFile())
"""
FROM_SPAWN = """
import os
import torch.utils.data, penstock

def main():
    os.environ["MAIN"] = str(os.getpid())
    spawn, threads = {"multiprocessing_context": "spawn"}, {"worker_type": "thread"}
    both = ((torch.utils.data.DataLoader, spawn), (penstock.DataLoader, spawn))
    for loader, options in (*both, (penstock.DataLoader, threads)):
        try:
            print(len(list(loader([1.0] * 8, num_workers=1, **options))))
        except RuntimeError as error:
            print(error)

if __name__ == "__main__":
    main()
"""


def _is_on_the_page(words: str) -> bool:
    return bool(re.search(rf"^## .*{re.escape(words)}", PAGE, re.MULTILINE))


@pytest.mark.parametrize("heading", CASES)
def test_torchs_loader_gives_the_error_and_penstocks_does_what_the_page_says(heading: str, tmp_path: Path) -> None:
    assert _is_on_the_page(heading)
    setup, torchs, ours = CASES[heading]
    code = COMMON.format(setup=setup).replace("ONCE", str(tmp_path / "once"))
    done = run(code)
    theirs, _, after = done.stdout.partition("penstock ")
    assert re.search(torchs, theirs + done.stderr, re.DOTALL), done.stdout + done.stderr
    assert re.search(ours, after, re.DOTALL), done.stdout + done.stderr


def _as_list(samples: list[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {"x": [sample["x"] for sample in samples]}


class Troubled(torch.utils.data.Dataset):
    """100 rows; sample 3 does what is said."""

    def __init__(self, trouble: str = "none") -> None:
        self.trouble = trouble

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 3 and self.trouble == "raises":
            raise ValueError("broken")
        if index == 3 and self.trouble == "ends its worker":
            os._exit(1)
        return {"x": torch.full((2 if index == 3 and self.trouble == "is shorter" else 3,), 1.0 + index)}


@pytest.mark.filterwarnings("ignore:.*(Its work is done again|DataLoader worker):RuntimeWarning")
@pytest.mark.parametrize(
    ("trouble", "advice", "left_out"),
    [
        ("raises", {"errors": "skip"}, 1),
        ("ends its worker", {"errors": "skip"}, 1),
        ("is shorter", {"collate_fn": penstock.PadCollate({"x": 0})}, 0),
        ("is shorter", {"collate_fn": _as_list}, 0),
        ("none", {"num_workers": "auto"}, 0),
    ],
)
def test_what_the_page_advises_gives_all_other_samples(trouble: str, advice: dict[str, Any], left_out: int) -> None:
    loader = penstock.DataLoader(Troubled(trouble), batch_size=2, **{"num_workers": 1, **advice})
    firsts = [float(row[0]) for batch in loader for row in batch["x"]]
    assert sorted(firsts) == [1.0 + index for index in range(100) if not (left_out and index == 3)]
    assert loader.statistics().skipped == left_out


def test_what_the_page_advises_for_open_files_is_enough() -> None:
    setup = "torch.multiprocessing.set_sharing_strategy('file_system'); for_penstock = {'num_workers': 4}"
    assert "64 descriptors are enough for 4 workers" in PAGE
    done = run(COMMON.format(setup=f"{DESCRIPTORS}; {setup}"))
    assert done.stdout == "torch made 200\npenstock made 200\n", done.stderr


def test_a_full_dev_shm_ends_torchs_loop_and_not_penstocks() -> None:
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    assert _is_on_the_page("unable to allocate shared memory(shm)")
    setup = "Rows.__getitem__ = lambda self, index: torch.zeros(100_000)"
    theirs, _, after = run(COMMON.format(setup=setup), *SMALL_SHM).stdout.partition("penstock ")
    assert "unable to allocate shared memory(shm) for file" in theirs
    assert "No space left on device" in theirs
    assert after == "made 200\n"


def test_shared_memory_that_a_sample_writes_to_and_that_is_not_there_is_a_bus_error() -> None:
    """With torch's and with penstock's loader: it is the dataset's own segment, and the sample is named."""
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    assert _is_on_the_page("Bus error: insufficient shared memory")
    setup = """
import multiprocessing.shared_memory
segment = multiprocessing.shared_memory.SharedMemory(create=True, size=4 << 20)
segment.unlink()
def bad(): segment.buf[::4096] = bytes(1024)
"""
    done = run(COMMON.format(setup=setup), *SMALL_SHM)
    theirs, _, after = done.stdout.partition("penstock ")
    assert "ERROR: Unexpected bus error encountered in worker" in done.stderr, done.stdout
    assert re.search("killed by signal: Bus error|exited unexpectedly", theirs), done.stdout
    assert re.search("Bus error.*sample 3", after, re.DOTALL), done.stdout


@pytest.mark.usefixtures("fresh_python")
def test_a_script_without_a_main_guard_cannot_spawn_workers_with_any_loader(tmp_path: Path) -> None:
    assert _is_on_the_page("An attempt has been made to start a new process before")
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_GUARD)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert "DataLoader caught\nDataLoader caught\n" in done.stdout, done.stderr
    assert "An attempt has been made to start a new process before" in done.stderr


@pytest.mark.usefixtures("fresh_python")
def test_workers_that_cannot_load_torch_end_a_loop_and_threads_need_not_load_it(tmp_path: Path) -> None:
    """As where Windows' paging file is too small for torch's libraries once more; an import hook simulates it."""
    assert _is_on_the_page("OSError: [WinError 1455] The paging file is too small for this operation to complete")
    (tmp_path / "sitecustomize.py").write_text(TOO_SMALL)
    script = tmp_path / "train.py"
    script.write_text(FROM_SPAWN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    torchs, ours, threads = done.stdout.splitlines()
    assert re.search(r"DataLoader worker \(pid.*\) exited unexpectedly", torchs), done.stderr
    assert "workers have ended like this before they made anything" in ours, done.stderr
    assert threads == "8"
    assert "[WinError 1455] The paging file is too small" in done.stderr


class Locked(torch.utils.data.Dataset[int]):
    """Sample 2 takes a lock of the training process; nobody releases it in a worker."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.is_waiting = lock, torch.multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.is_waiting.set()
            with self.lock:
                pass
        return index


def test_a_lock_that_was_held_when_workers_were_forked_hangs_the_loop_and_timeout_names_the_sample() -> None:
    assert _is_on_the_page("The loop hangs")
    lock = threading.Lock()
    dataset = Locked(lock)
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork", "timeout": 4}
    with lock:
        batches = iter(penstock.DataLoader(dataset, **options))
        assert next(batches).tolist() == [0, 1]
    dataset.is_waiting.wait()
    with pytest.raises(RuntimeError, match=r"timed out.*is at sample 2"):
        next(batches)
    del batches


class Activations(torch.nn.Module):
    """A layer whose activations lie in the memory of a simulated device, with room for 4 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)
        self.device = Sim(capacity_nbytes=4096)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = torch.Size([len(rows), 1024])
        taken = self.device.empty(TensorSpec(shape, (1024, 1), torch.uint8))
        return self.layer(rows) + 0 * taken[:, :1]


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(rows).square().sum(), len(rows)


def test_a_step_that_the_device_has_no_memory_for_is_taken_in_parts_with_the_same_gradients() -> None:
    """Simulated; tests/memory fails each single operation of a step, and tests/cuda waits for a GPU."""
    assert _is_on_the_page("torch.OutOfMemoryError: CUDA out of memory")
    rows = torch.arange(16.0).reshape(8, 2)
    model = Activations()
    with pytest.raises(torch.OutOfMemoryError):
        _loss(model, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = penstock.TrainStep(model, optimizer, _loss)
    step(rows)
    assert step.statistics().micro_batch == 4
    whole = torch.ones(1, 2, requires_grad=True)
    (rows @ whole.T).square().sum().div(8).backward()
    assert whole.grad is not None
    torch.testing.assert_close(model.layer.weight.detach(), 1 - 1e-4 * whole.grad)
