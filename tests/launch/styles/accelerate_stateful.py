"""Accelerate with torchdata's loader: a loop that stops in the middle of an epoch, and one that resumes."""

import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset


def prepared(workers):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=workers))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    # Accelerate asks each loader for its state at once, with workers that end before they send anything. With shared
    # descriptors the thread that sends may then make its socket in the folder that the worker's end is removing.
    torch.multiprocessing.set_sharing_strategy("file_system")
    for workers in (0, 2):
        loader = prepared(workers)
        batches = iter(loader)
        print(*(next(batches)[0].tolist() for _ in range(3)))
        other = prepared(workers)
        other.load_state_dict(loader.state_dict())
        print(*(batch.tolist() for (batch,) in other))
        del batches
