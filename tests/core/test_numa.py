"""What is near a device is found out from the system's files, and preferred where the system lets us."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from penstock import DataLoader, Sim
from penstock.core import numa
from penstock.loader import factory


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """The files of a machine with two nodes and a GPU on the second."""
    for node, cores in {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}.items():
        path = tmp_path / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(cores + "\n")
    gpu = tmp_path / "bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    return tmp_path


def test_nodes_with_cores_are_listed(two_nodes: Path) -> None:
    assert numa.cores_by_node(two_nodes) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}


def test_the_node_of_a_device_is_that_of_its_pci_address(two_nodes: Path) -> None:
    assert numa.node_of_pci("0000:3B:00.0", two_nodes) == 1
    assert numa.node_of_pci("0000:99:00.0", two_nodes) is None


def test_a_machine_that_lists_no_nodes_has_none(tmp_path: Path) -> None:
    assert numa.cores_by_node(tmp_path) == {}
    assert numa.node_of_pci("0000:3b:00.0", tmp_path) is None
    assert numa.cores_near(0, 1, tmp_path) is None


def test_workers_keep_all_cores_if_the_node_has_too_few(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 6})
    assert numa.cores_near(1, 3, two_nodes) == {4, 5, 6}
    assert numa.cores_near(1, 4, two_nodes) is None
    assert numa.cores_near(None, 1, two_nodes) is None


def test_memory_takes_the_preference_for_a_node_that_exists_and_no_other() -> None:
    memory = memoryview(mmap.mmap(-1, 1 << 16))
    if 0 not in numa.cores_by_node() or not numa.prefer_memory(memory, 0):
        pytest.skip("this system lets nobody choose a node")
    assert not numa.prefer_memory(memory, 1000)


class Cores(Dataset[torch.Tensor]):
    """Each sample is the set of cores that its worker may use."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        cores = torch.zeros(4096)
        cores[list(os.sched_getaffinity(0))] = 1
        return cores


def test_workers_run_and_slots_lie_near_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    core, asked = min(os.sched_getaffinity(0)), []
    monkeypatch.setattr(factory, "cores_near", lambda node, workers: frozenset({core}) if node == 0 else None)
    monkeypatch.setattr(factory, "prefer_memory", lambda memory, node: asked.append((len(memory), node)))
    loader = DataLoader(Cores(), batch_size=2, num_workers=1, device=Sim(numa_node=0))
    for batch in loader:
        assert batch.sum(1).tolist() == [1, 1]
        assert batch[:, core].tolist() == [1, 1]
    assert asked
    assert all(node == 0 for _, node in asked)
    assert loader.statistics().pinning == "slots, for copies to sim, on its NUMA node 0"


def test_without_nodes_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "prefer_memory", lambda memory, node: pytest.fail("memory was bound"))
    for batch in DataLoader(Cores(), batch_size=2, num_workers=1, device="sim"):
        assert batch.sum(1).tolist() == [len(os.sched_getaffinity(0))] * 2
