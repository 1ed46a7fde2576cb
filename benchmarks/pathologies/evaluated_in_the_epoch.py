"""An evaluation of all of the validation's samples after every few steps, with gradients on."""

import torch
from torch.utils.data import DataLoader
from work import Cheap, compute, interpret, one_core


def train(*, every: int = 10) -> None:
    one_core()
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader, held_out = DataLoader(Cheap(), batch_size=16), DataLoader(Cheap(512), batch_size=16)
    while True:
        for step, batch in enumerate(loader):
            compute(2)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if step % every == every - 1:
                for other in held_out:
                    interpret(2)
                    model(other)


def fixed() -> None:
    train(every=256)
