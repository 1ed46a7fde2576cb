"""Lightning keeps a loader's state in its checkpoints, and goes on from the middle of an epoch."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from penstock import DataLoader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Numbers(Dataset[Tensor]):
    """Its index is the sample."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def fit(folder: Path, steps: int, workers: int, checkpoint: str | None = None) -> list[list[int]]:
    """Train until so many steps are done in all, and return the batches."""
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

    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", callbacks=[keep], **quiet)
    model = Line()
    trainer.fit(model, DataLoader(Numbers(), 4, shuffle=True, seed=3, num_workers=workers), ckpt_path=checkpoint)
    return model.seen


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
def test_a_trainer_goes_on_with_the_batches_that_it_had_not_had(tmp_path: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    whole = fit(tmp_path / "whole", 16, 0)
    first = fit(tmp_path / "parts", 6, 2)
    then = fit(tmp_path / "parts", 16, 1, str(tmp_path / "parts" / "last.ckpt"))
    assert len(first) == 6
    assert first + then == whole
