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


RESUMED = """
import shutil

class Noted(Training):
    def training_step(self, model, inputs, *more):
        self.seen.append((inputs["labels"].flatten().tolist(), float(inputs["noise"].sum())))
        return super().training_step(model, {name: inputs[name] for name in ("x", "labels")}, *more)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(dataset)

    def __getitem__(self, index):
        return {**dataset[index], "noise": torch.from_numpy(penstock.sample_rng().normal(size=1))}


def trained(folder, workers, checkpoint=None, **more):
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, use_cpu=True,
        report_to=[], save_steps=1, dataloader_num_workers=workers, ignore_data_skip=True,
        remove_unused_columns=False, **more,
    )
    trainer = Noted(Model(), arguments, train_dataset=Noisy(), callbacks=[LoaderState()])
    trainer.seen = []
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


whole = trained("whole", 2)
assert len(whole.seen) == 16
for step in (1, 3, 4, 6):
    shutil.copytree(f"whole/checkpoint-{step}", f"rest-{step}/checkpoint-{step}")
    rest = trained(f"rest-{step}", step % 3, f"rest-{step}/checkpoint-{step}")
    assert rest.seen == whole.seen[2 * step :], step
    for one, other in zip(rest.model.parameters(), whole.model.parameters()):
        assert torch.equal(one, other)
"""


def test_the_recipe_on_the_site_trains_with_hugging_faces_trainer_and_resumes_its_order(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(recipe("Hugging Face Trainer") + RESUMED)
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
