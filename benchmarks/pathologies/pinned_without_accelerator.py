"""pin_memory=True where there is nothing to copy to."""

import warnings

from torch.utils.data import DataLoader
from work import Cheap, compute, one_core


def main():
    one_core()
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")
    return DataLoader(Cheap(), batch_size=16, num_workers=1, pin_memory=True), lambda batch: compute(30)
