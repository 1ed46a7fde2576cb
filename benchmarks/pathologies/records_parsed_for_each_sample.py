"""Records kept as JSON text, which every sample parses."""

import json

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Records(Sized):
    def __init__(self) -> None:
        super().__init__(512)
        self.lines = [json.dumps({"values": [number + place / 2 for place in range(800)]}) for number in range(512)]

    def __getitem__(self, index: int) -> torch.Tensor:
        record = json.loads(self.lines[index])
        return torch.tensor(record["values"])


class Parsed(Records):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.tensor([json.loads(line)["values"] for line in self.lines])

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def main():
    one_core()
    return DataLoader(Records(), batch_size=32, num_workers=2, shuffle=True, persistent_workers=True), _step


def fixed():
    one_core()
    return DataLoader(Parsed(), batch_size=32, num_workers=2, shuffle=True, persistent_workers=True), _step


def _step(batch: torch.Tensor) -> None:
    compute(3)
