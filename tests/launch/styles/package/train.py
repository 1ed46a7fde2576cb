"""python -m package.train: relative imports and a loader created for every epoch."""

import sys

import torch
from torch.utils.data import DataLoader

from . import NAME
from .data import Numbers

if __name__ == "__main__":
    print(NAME, sys.argv[1:], __spec__.name)
    torch.manual_seed(2)
    weight = torch.zeros(1, requires_grad=True)
    for epoch in range(3):
        for batch in DataLoader(Numbers(), batch_size=6, shuffle=True, drop_last=True, num_workers=1):
            loss = ((weight * batch - 2 * batch) ** 2).mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 1e-4 * gradient
            print(epoch, loss.item())
