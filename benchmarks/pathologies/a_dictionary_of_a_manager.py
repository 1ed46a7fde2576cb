"""Labels in a dictionary of a multiprocessing.Manager, which every sample asks eight times."""

import multiprocessing

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Managed(Sized):
    def __init__(self, labels: dict[int, float]) -> None:
        super().__init__()
        self.labels = labels

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.labels[(index * 7 + number) % 4096] for number in range(8)])


def loop(labels: dict[int, float]):
    one_core()
    return DataLoader(Managed(labels), batch_size=16, num_workers=2, shuffle=True), lambda batch: compute(6)


def main():
    manager = multiprocessing.Manager()
    loader, step = loop(manager.dict({number: float(number) for number in range(4096)}))
    _managers.append(manager)
    return loader, step


def fixed():
    return loop({number: float(number) for number in range(4096)})


_managers = []
