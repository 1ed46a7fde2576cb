"""A dataset that raises in a worker, and a script that has its own words for it."""

import torch
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset):
    """The thirteenth sample is broken."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise ValueError(f"sample {index} cannot be read")
        return torch.tensor(index)


def train(loader):
    for number, batch in enumerate(loader):
        print(number, batch.tolist(), flush=True)


if __name__ == "__main__":
    try:
        train(DataLoader(Broken(), batch_size=4))
    except ValueError as error:
        raise RuntimeError("training has failed") from error
