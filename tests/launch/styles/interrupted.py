"""A script that is interrupted in its loop, as by Ctrl-C, and cleans up."""

import os
import signal

import torch
from torch.utils.data import DataLoader

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was started with interrupts ignored
loader = DataLoader(torch.arange(100.0), batch_size=4, num_workers=2)
try:
    for number, batch in enumerate(loader):
        print(number, batch.sum().item(), flush=True)
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
finally:
    print("cleaned up", flush=True)
