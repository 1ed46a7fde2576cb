"""Samples in memory, a real model, no workers, and none needed."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import one_core


def train() -> None:
    one_core()
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(1000):
        total = torch.zeros(())
        for inputs, labels in DataLoader(data, batch_size=64, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch}: {total.item():.3f}")
