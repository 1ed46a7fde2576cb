"""torchdata's StatefulDataLoader, as it is and subclassed: loops that stop in the middle of an epoch and go on."""

import pickle
import warnings

import torch
from torch.utils.data import IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Text(IterableDataset):
    """Packs a text into windows and keeps its place, as training of language models does."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 60:
            self.place += 3
            yield torch.arange(self.place - 3, self.place)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class OfRank(StatefulDataLoader):
    """Keeps its state under the rank's name, pickled, as checkpoints of many ranks want it."""

    def state_dict(self):
        return {"rank_0": pickle.dumps(super().state_dict())}

    def load_state_dict(self, state):
        super().load_state_dict(pickle.loads(state["rank_0"]))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".set_vital. is deprecated")
    for kind, dataset, workers in (
        (StatefulDataLoader, TensorDataset(torch.arange(40)), 0),
        (StatefulDataLoader, TensorDataset(torch.arange(40)), 2),
        (OfRank, Text(), 0),
        (OfRank, Text(), 1),
    ):
        loader = kind(dataset, batch_size=4, num_workers=workers)
        batches = iter(loader)
        print(*(next(batches)[0].tolist() for _ in range(3)))
        state = loader.state_dict()
        del batches
        if isinstance(dataset, Text):
            dataset = Text()
        other = kind(dataset, batch_size=4, num_workers=workers)
        other.load_state_dict(state)
        print(*(batch[0].tolist() for batch in other))
