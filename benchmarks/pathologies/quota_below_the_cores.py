"""A container that shows all cores and may use one; `CGROUP` is what its kernel would show."""

from torch.utils.data import DataLoader
from work import Cheap, compute, one_core

CGROUP = {"cpu.max": "100000 100000\n", "cpu.stat": "usage_usec 1\nthrottled_usec 0\n"}


def main():
    one_core()
    return DataLoader(Cheap(), batch_size=16, num_workers=3), lambda batch: compute(30)
