"""A vocabulary that is turned into a dict for every sample."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Texts(Sized):
    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self.words = [f"word{number}" for number in range(8000)]
        self.numbers = {word: number for number, word in enumerate(self.words)} if once else None

    def __getitem__(self, index: int) -> torch.Tensor:
        text = " ".join(self.words[index % 7000 : index % 7000 + 60])
        return torch.tensor(self.encode(text))

    def encode(self, text: str) -> list[int]:
        if self.numbers is not None:
            return [self.numbers[word] for word in text.split()]
        numbers = {word: number for number, word in enumerate(self.words)}
        return [numbers[word] for word in text.split()]


def main(*, once: bool = False):
    one_core()
    return DataLoader(Texts(once=once), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(4)


def fixed():
    return main(once=True)
