"""Images that become floats without being scaled, for a real convolution."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from work import one_core


def train() -> None:
    one_core()
    images = torch.randint(0, 256, (1024, 3, 32, 32), dtype=torch.uint8)
    data = TensorDataset(images.float(), torch.randint(0, 10, (1024,)))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 14 * 14, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(1000):
        for inputs, labels in DataLoader(data, batch_size=32, shuffle=True):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
