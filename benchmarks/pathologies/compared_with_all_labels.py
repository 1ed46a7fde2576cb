"""A regression whose predictions are [n, 1] and whose labels are [n]."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import one_core


def train() -> None:
    one_core()
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, inputs.sum(1))
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        for x, y in DataLoader(data, batch_size=128, shuffle=True):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
