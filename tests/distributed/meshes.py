"""Cases of tests/distributed/loading.py in which one replica of the model is several ranks of a device mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.data import Dataset

import penstock

COUNT = 44


class Noisy(Dataset[Any]):
    """Sample i is i and eight numbers drawn at random: from the seed, and as a library draws its own."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.from_numpy(penstock.sample_rng().normal(size=4))
        return torch.cat([torch.tensor([float(index)], dtype=torch.float64), drawn, torch.rand(4, dtype=torch.float64)])


def mesh_of(**sizes: int) -> DeviceMesh:
    """Return the mesh of all ranks with these dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def of_all(found: Any) -> list[Any]:
    """Return what each rank has, by rank."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def rows(batches: Any) -> list[list[float]]:
    """Return the samples of `Noisy` in batches."""
    return [row for batch in batches for row in batch.tolist()]


def noisy(distributed: Any, **options: Any) -> penstock.DataLoader[Any]:
    """Return the loader of `Noisy` that these cases train on."""
    defaults = {"shuffle": True, "seed": 3, "num_workers": 1, "distributed": distributed, "uneven": "drop"}
    return penstock.DataLoader(Noisy(), 2, **{**defaults, **options})  # type: ignore[arg-type]


def tensor_parallel(folder: Path) -> None:
    """Two replicas of two ranks, whose programs have torch seeded differently; then one of four."""
    torch.manual_seed(dist.get_rank())
    mesh = mesh_of(dp=2, tp=2)
    loader = noisy(mesh["dp"], num_workers=2)
    iterator = iter(loader)
    first = rows(next(iterator) for _ in range(3))
    state = loader.state_dict()
    dcp.save({"loader": loader}, checkpoint_id=folder / "tp")
    whole = of_all(first + rows(iterator))
    assert whole[0] == whole[1]
    assert whole[2] == whole[3]
    assert sorted(row[0] for row in whole[0] + whole[2]) == list(range(COUNT))
    assert len({tuple(row[1:5]) for row in whole[0] + whole[2]}) == COUNT
    resumed = noisy(mesh["dp"], num_workers=0)
    resumed.load_state_dict(state)
    assert first + rows(resumed) == whole[dist.get_rank()]
    for sizes in ({"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}):
        resumed = noisy(mesh_of(**sizes)["dp"], num_workers=0)
        dcp.load({"loader": resumed}, checkpoint_id=folder / "tp")
        rest = of_all(rows(resumed))
        everybody = rest[0] if sizes["dp"] == 1 else [row for one in rest for row in one]
        assert sizes["dp"] == 4 or all(one == rest[0] for one in rest)
        assert sorted(everybody) == sorted(whole[0][6:] + whole[2][6:])


def context_parts(folder: Path) -> None:
    """Packed documents, of which each rank of a replica has its part of the sequence."""
    mesh = mesh_of(dp=2, cp=2)
    names = ["tokens", "targets", "documents", "positions"]
    source = penstock.open(
        folder.parent / "tokens.bin", dtype="uint16", length=16, eos=0, targets=True, as_dtype="int64", fields=names
    )
    loader = penstock.DataLoader(source, 2, shuffle=True, seed=0, distributed=mesh["dp"], num_workers=1)
    seen = []
    for batch in loader:
        whole = {name: batch[name].clone() for name in names}
        is_new = whole["documents"].diff(dim=1) != 0
        assert bool((whole["positions"][:, 1:][is_new] == 0).all())
        buffers = [batch[name] for name in names]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers=set(buffers)):
            part = [buffer.clone() for buffer in buffers]
        seen.append(([whole[name] for name in names], part))
    by_rank = of_all(seen)
    for one, other in zip(by_rank[::2], by_rank[1::2], strict=True):
        for (batch, mine), (same, theirs) in zip(one, other, strict=True):
            assert all(map(torch.equal, batch, same))
            for column, (left, right) in enumerate(zip(mine, theirs, strict=True)):
                assert left.shape == right.shape == (len(batch[0]), 8)
                both = torch.cat([left, right], 1)
                order = torch.cat([mine[0], theirs[0]], 1)
                for row in range(len(both)):  # the parts are a permutation of the sequence, the same for all fields
                    pairs = sorted(zip(order[row].tolist(), both[row].tolist(), strict=True))
                    assert pairs == sorted(zip(batch[0][row].tolist(), batch[column][row].tolist(), strict=True))
    assert not torch.equal(by_rank[0][0][0][0], by_rank[2][0][0][0])


def pipeline(folder: Path) -> None:
    """Four stages, of which the first takes the input and the last the target; the others only count."""
    mesh = mesh_of(dp=1, pp=4)
    stage = mesh["pp"].get_local_rank()
    loader = noisy(mesh["dp"])
    reads = stage in (0, 3)
    batches = iter(loader) if reads else None
    seen = []
    for number in range(len(loader)):
        seen += rows([next(batches)] if batches is not None else [])
        if number == 3:
            dcp.save({"loader": loader}, checkpoint_id=folder / "pp")
    found = of_all(seen)
    assert found[0] == found[3]
    assert len(found[0]) == COUNT
    assert not found[1]
    assert not found[2]
    # Ranks that counted have a state of nothing; with two replicas they read, and there it is another's that counts.
    for sizes in ({"dp": 1, "pp": 4}, {"dp": 2, "pp": 2}, {"dp": 4, "pp": 1}):
        resumed = noisy(mesh_of(**sizes)["dp"], num_workers=0)
        dcp.load({"loader": resumed}, checkpoint_id=folder / "pp")
        rest = of_all(rows(resumed))
        replicas = [rest[rank] for rank in range(0, 4, 4 // sizes["dp"])]
        assert sorted(row for one in replicas for row in one) == sorted(found[0][8:]), sizes
    # Once more: where only the first stages read, the last ones have what they loaded, of a mesh of before.
    mesh = mesh_of(dp=2, pp=2)
    loader = noisy(mesh["dp"], num_workers=0)
    dcp.load({"loader": loader}, checkpoint_id=folder / "pp")
    if mesh["pp"].get_local_rank() == 0:
        next(iter(loader))
    dcp.save({"loader": loader}, checkpoint_id=folder / "pp again")
    resumed = noisy(mesh_of(dp=4, pp=1)["dp"], num_workers=0)
    dcp.load({"loader": resumed}, checkpoint_id=folder / "pp again")
    assert sorted(row for one in of_all(rows(resumed)) for row in one) == sorted(found[0][12:])


def hand_made_groups(folder: Path) -> None:
    """Megatron's order: neighbours are tensor-parallel, and a data-parallel group has every second rank."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    own = groups[rank % 2]
    loader = noisy(own)
    lengths = [len(str(number)) + number % 7 for number in range(COUNT)]
    place, size = dist.get_rank(own), dist.get_world_size(own)
    by_tokens = penstock.TokenBatches(lengths, 20, seed=5, rank=place, ranks=size)
    drawn = penstock.DataLoader(range(COUNT), batch_sampler=by_tokens, num_workers=1)  # type: ignore[arg-type]
    whole = of_all([rows(loader), [batch.tolist() for batch in drawn]])
    assert whole[0] == whole[1]
    assert whole[2] == whole[3]
    assert sorted(row[0] for row in whole[0][0] + whole[2][0]) == list(range(COUNT))
    assert len(whole[0][1]) == len(whole[2][1])
    shared = [number for replica in (whole[0], whole[2]) for batch in replica[1] for number in batch]
    assert len(shared) == len({*shared})


CASES = {
    "dp x tp": tensor_parallel,
    "dp x cp": context_parts,
    "pp": pipeline,
    "groups made by hand": hand_made_groups,
}
