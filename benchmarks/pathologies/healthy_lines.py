"""Text with short lines that come again and again, in the training and in the validation."""

import torch
from torch.utils.data import DataLoader, random_split
from work import Sized, compute, one_core


class Lines(Sized):
    def __init__(self) -> None:
        super().__init__(4000)
        words = torch.Generator().manual_seed(0)
        self.lines = [torch.randint(1, 30_000, (1 + number % 40,), generator=words) for number in range(2000)]
        self.usual = [torch.randint(1, 30_000, (1 + number % 6,), generator=words) for number in range(20)]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        line = self.lines[index // 2] if index % 2 else self.usual[index // 2 % 20]
        ids = torch.zeros(256, dtype=torch.int64)
        ids[: len(line)] = line
        return {"ids": ids, "mask": (ids > 0).long(), "class": torch.tensor(index % 3)}


def train() -> None:
    one_core()
    training, validation = random_split(Lines(), [0.9, 0.1])
    training_loader = DataLoader(training, batch_size=16, shuffle=True)
    validation_loader = DataLoader(validation, batch_size=16)
    for _ in range(1000):
        for _ in training_loader:
            compute(80)
        with torch.no_grad():
            for _ in validation_loader:
                compute(20)
