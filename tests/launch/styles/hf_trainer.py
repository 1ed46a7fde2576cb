"""Hugging Face's Trainer on a small model of one's own; nothing is downloaded."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Lines(Dataset):
    """Points and their sums."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 4) * index / 48
        return {"x": x, "labels": x.sum()[None]}


class Model(torch.nn.Module):
    """One linear layer that returns its loss, as the Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


class Said(TrainerCallback):
    """Prints every loss, and nothing that is a time."""

    def on_log(self, args, state, control, logs=None, **_):
        print(state.global_step, {key: value for key, value in sorted(logs.items()) if "loss" in key})


def main():
    set_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=2,
            log_level="error",
        )
        trainer = Trainer(Model(), arguments, train_dataset=Lines(), eval_dataset=Lines(), callbacks=[Said()])
        trainer.pop_callback(
            next(kind for kind in map(type, trainer.callback_handler.callbacks) if "Printer" in kind.__name__)
        )
        trainer.train()
    print("over", file=sys.stderr)


if __name__ == "__main__":
    main()
