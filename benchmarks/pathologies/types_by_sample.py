"""Scores as JSON has them: a whole number is an int, so a batch is int64, float32 or float64."""

import torch
from torch.utils.data import DataLoader
from work import Sized, compute, one_core


class Scored(Sized):
    def __getitem__(self, index: int) -> dict[str, object]:
        score = index % 10 / 2
        return {"x": torch.full((64,), float(index)), "score": int(score) if score.is_integer() else score}


def main():
    one_core()
    return DataLoader(Scored(), batch_size=16), lambda batch: compute(20)
