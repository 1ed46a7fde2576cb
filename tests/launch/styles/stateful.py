"""torchdata's StatefulDataLoader: a loop that stops in the middle of an epoch, and one that goes on from its state."""

import warnings

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".set_vital. is deprecated")
    dataset = TensorDataset(torch.arange(40))
    for workers in (0, 2):
        loader = StatefulDataLoader(dataset, batch_size=4, num_workers=workers)
        batches = iter(loader)
        print(*(next(batches)[0].tolist() for _ in range(3)))
        state = loader.state_dict()
        other = StatefulDataLoader(dataset, batch_size=4, num_workers=workers)
        other.load_state_dict(state)
        print(*(batch.tolist() for (batch,) in other))
