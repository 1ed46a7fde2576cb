"""A collate function that pads sequences in Python."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Sentences(Sized):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(400 + index % 50)


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    longest = max(map(len, samples))
    rows = []
    for sample in samples:
        row = [int(value) for value in sample]
        while len(row) < longest:
            row.append(0)
        rows.append(row)
    return torch.tensor(rows)


def main():
    one_core()
    return DataLoader(Sentences(), batch_size=16, num_workers=1, collate_fn=pad), lambda batch: compute(2)


def pad_at_once(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def fixed():
    one_core()
    loader = DataLoader(Sentences(), batch_size=16, num_workers=1, collate_fn=pad_at_once)
    return loader, lambda batch: compute(2)
