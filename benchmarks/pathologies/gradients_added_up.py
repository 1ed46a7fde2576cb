"""A classifier of vectors whose gradients are never cleared."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import one_core


def train() -> None:
    one_core()
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        for inputs, labels in DataLoader(data, batch_size=128, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
