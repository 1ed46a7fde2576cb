"""A pipeline of generators over an endless loader, under autocast, with a model that is compiled from a context."""

import contextlib
import itertools

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def forever(loader):
    while True:
        yield from loader


def moved(batches):
    for batch in batches:
        yield [tensor.contiguous() for tensor in batch]


@contextlib.contextmanager
def step(optimizer):
    optimizer.zero_grad()
    yield
    optimizer.step()


def losses():
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(40, 4, generator=generator)
    dataset = TensorDataset(x, x.mean(1, keepdim=True))
    sampler = RandomSampler(dataset, replacement=True, num_samples=24, generator=generator)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in moved(forever(loader)):
        with step(optimizer):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.l1_loss(model(inputs), targets)
            loss.backward()
        yield loss.item()


torch.manual_seed(12)
for number, loss in enumerate(itertools.islice(losses(), 20)):
    print(number, loss)
