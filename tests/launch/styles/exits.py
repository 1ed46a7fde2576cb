"""A script that stops in the middle of an epoch, with an exit code and an exit handler."""

import atexit
import sys

import torch
from torch.utils.data import DataLoader

atexit.register(print, "good bye")

if __name__ == "__main__":
    for number, batch in enumerate(DataLoader(torch.arange(100.0), batch_size=4, num_workers=2)):
        print(number, batch.sum().item())
        if number == 5:
            print("the loss is not finite", file=sys.stderr)
            sys.exit(3)
