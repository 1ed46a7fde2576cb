"""Lightning keeps a loader's state in its checkpoints, and goes on from the middle of an epoch."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import recipe
from torch import Tensor
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.launch.patch_torch import TorchPatch
from penstock.observe.live.loader_registry import LoaderRegistry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Numbers(Dataset[Tensor]):
    """Its index is the sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def fit(
    folder: Path, steps: int, loader: Any, checkpoint: str | None = None, epochs: int = -1, **when: Any
) -> list[list[int]]:
    """Train until so many steps or epochs are done in all, and return the batches; `when` says when to save."""
    import lightning

    class Line(lightning.LightningModule):
        """Notes the batches that it is trained on."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            self.seen.append(batch.flatten().int().tolist())
            loss: Tensor = self.layer(batch / 40).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, **when or {"every_n_train_steps": 1}, save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, max_epochs=epochs, accelerator="cpu", callbacks=[keep], **quiet)
    model = Line()
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model.seen


def test_a_trainer_goes_on_with_the_batches_that_it_had_not_had(tmp_path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loaders = [DataLoader(Numbers(), 4, shuffle=True, seed=3, num_workers=workers) for workers in (0, 2, 1)]
    whole = fit(tmp_path / "whole", 16, loaders[0])
    first = fit(tmp_path / "parts", 6, loaders[1])
    then = fit(tmp_path / "parts", 16, loaders[2], str(tmp_path / "parts" / "last.ckpt"))
    assert len(first) == 6
    assert first + then == whole


@pytest.mark.parametrize("when", [{"every_n_epochs": 1}, {"every_n_train_steps": 10}])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(tmp_path: Path, when: Any, workers: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loaders = [DataLoader(Numbers(), 4, shuffle=True, seed=3, num_workers=workers) for _ in "abc"]
    whole = fit(tmp_path / "whole", -1, loaders[0], epochs=3, **when)
    first = fit(tmp_path / "parts", -1, loaders[1], epochs=1, **when)
    then = fit(tmp_path / "parts", -1, loaders[2], str(tmp_path / "parts" / "last.ckpt"), epochs=3, **when)
    assert (len(first), len(then)) == (10, 20)
    assert first + then == whole


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Replace torch's loader, as `penstock run` does."""
    patch = TorchPatch(LoaderRegistry())
    patch.install()
    try:
        yield
    finally:
        patch.remove()


@pytest.mark.parametrize("kind", ["torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"])
def test_checkpoints_resume_alike_whether_torchs_loader_was_replaced_or_not(tmp_path: Path, kind: str) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, _, name = kind.rpartition(".")

    def seen(folder: Path, saves: Any, loads: Any) -> list[list[int]]:
        found = []
        for steps, checkpoint, surroundings in ((6, None, saves), (12, str(folder / "last.ckpt"), loads)):
            with surroundings():
                loader = getattr(importlib.import_module(module), name)(Numbers(), 4)
                found += fit(folder, steps, loader, checkpoint)
        return found

    plain = seen(tmp_path / "plain", contextlib.nullcontext, contextlib.nullcontext)
    assert len(plain) >= 12
    assert seen(tmp_path / "saved", replaced, contextlib.nullcontext) == plain
    assert seen(tmp_path / "loaded", contextlib.nullcontext, replaced) == plain


@pytest.mark.parametrize("name", ["Fabric", "Lightning"])
def test_the_recipe_on_the_site_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    monkeypatch.chdir(tmp_path)
    exec(compile(recipe(name), f"docs/recipes.md, {name}", "exec"), {"__name__": "a_page"})
