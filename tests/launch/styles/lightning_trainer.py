"""A LightningModule and its Trainer, with training and validation loaders."""

import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Line(lightning.LightningModule):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        print("train", number, loss.item())
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        print("validate", number, torch.nn.functional.mse_loss(self.layer(x), y).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    lightning.seed_everything(3, workers=True, verbose=False)
    x = torch.randn(64, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Line(),
        DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True),
        DataLoader(dataset, batch_size=32, num_workers=1),
    )


if __name__ == "__main__":
    main()
