"""What looks like a mixed-up split and is none: oversampled after it was split, blank images, training accuracy too."""

import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, random_split
from work import one_core


def train() -> None:
    one_core()
    images = torch.randint(0, 256, (2048, 3, 32, 32), dtype=torch.uint8)
    images[::7] = 0
    data = TensorDataset(images.float() / 255, torch.randint(0, 10, (2048,)))
    common, rare = random_split(data, [0.9, 0.1])
    train_common, val_common = random_split(common, [0.8, 0.2])
    train_rare, val_rare = random_split(rare, [0.8, 0.2])
    training = ConcatDataset([train_common, *[train_rare] * 3])
    train_loader = DataLoader(training, batch_size=32, shuffle=True)
    val_loader = DataLoader(ConcatDataset([val_common, val_rare]), batch_size=32)
    train_accuracy_loader = DataLoader(training, batch_size=32)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 28 * 28, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        for inputs, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for loader in (val_loader, train_accuracy_loader):
                for inputs, _ in loader:
                    model(inputs)
