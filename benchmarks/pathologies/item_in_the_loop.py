"""The loss is read back in every step."""

import torch
from torch.utils.data import DataLoader
from work import Cheap, compute, one_core


def train() -> None:
    one_core()
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.Adam(model.parameters())
    running = 0.0
    for _ in range(1000):
        for batch in DataLoader(Cheap(), batch_size=16):
            compute(20)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
