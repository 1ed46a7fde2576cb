"""A classifier with dropout that is validated before its training, and stays in evaluation mode."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import one_core


def train() -> None:
    one_core()
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    held_out = TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(held_out, batch_size=256))
        print(f"{correct} of {len(held_out)}")
        for inputs, labels in DataLoader(data, batch_size=128, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
