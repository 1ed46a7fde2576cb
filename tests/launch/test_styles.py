"""Scripts of many styles do under `penstock run` what they do under Python: same losses, output, tracebacks, exit code.

Each is run both ways, with the real packages; what it prints is compared bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launch.programs import python
from page_blocks import recipe
from scripts import written

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_frameworks")]

STYLES = Path(__file__).parent / "styles"
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

ENDS = {"raises.py": 1, "exits.py": 3, "interrupted.py": -2}


@pytest.mark.parametrize(
    ("before", "command"),
    [
        pytest.param((), ("plain_loop.py",), id="plain loop"),
        pytest.param((), ("argparse_main.py", "--epochs", "2"), id="main with arguments, spawned workers"),
        pytest.param((), ("argparse_main.py", "--epochs", "2", "--start-method", "fork"), id="the same, forked"),
        pytest.param((), ("lightning_trainer.py",), id="Lightning Trainer"),
        pytest.param((), ("accelerate_loop.py",), id="Accelerate"),
        pytest.param((), ("hf_trainer.py",), id="Hugging Face Trainer"),
        pytest.param((), ("-m", "package.train", "--lr", "1"), id="python -m"),
        pytest.param((), ("iterable.py",), id="iterable dataset"),
        pytest.param((), ("stateful.py",), id="torchdata's StatefulDataLoader"),
        pytest.param((), ("accelerate_stateful.py",), id="Accelerate with StatefulDataLoader"),
        pytest.param((), ("raises.py",), id="raises"),
        pytest.param((), ("exits.py",), id="exits"),
        pytest.param((), ("interrupted.py",), id="interrupted"),
        pytest.param((), ("generators.py",), id="generators under autocast"),
        pytest.param((), ("processes.py",), id="processes of its own"),
        pytest.param(TORCHRUN, ("parallel.py",), id="DistributedDataParallel under torchrun"),
    ],
)
def test_a_script_does_under_penstock_what_it_does_under_python(
    tmp_path: Path, before: tuple[str, ...], command: tuple[str, ...]
) -> None:
    shutil.copytree(STYLES, tmp_path, dirs_exist_ok=True)
    plain = python(tmp_path, *before, *command, **QUIET)
    run = python(tmp_path, *before, "-m", "penstock", "run", "--quiet", *command, **QUIET)
    assert plain.returncode == ENDS.get(command[0], 0), plain.stderr
    assert plain.stdout.count("\n") >= 3
    assert run.stdout == plain.stdout
    assert run.returncode == plain.returncode
    assert _lasting(run.stderr) == _lasting(plain.stderr)
    assert written(tmp_path).exists()


def test_the_recipe_on_the_site_trains_with_hugging_faces_trainer(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(recipe("Hugging Face Trainer"))
    done = python(tmp_path, "recipe.py", **QUIET)
    assert done.returncode == 0, done.stderr


def _lasting(stderr: str) -> list[str]:
    """Return what is the same in every run: all but loaders' frames and notes, and torchrun's lines with the time."""
    found, is_loaders = [], False
    for line in stderr.splitlines():
        if line.startswith('  File "'):
            is_loaders = "torch/utils/data/" in line or "penstock/loader/" in line
        elif not line.startswith("    "):
            is_loaders = False
        is_note = line.startswith("(penstock: raised for sample ")
        if not (is_loaders or is_note) and "torch/distributed" not in line:
            found.append(line)
    return found
