"""What each rank of tests/memory/test_rank_sync.py runs, under the real torchrun: `ranks.py FOLDER CASE...`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from end_together import run_cases
from scarcity import FailAt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import OutOfMemoryError, RankError, TrainStep

SIZES = [5, 8, 3, 7]


class Net(nn.Module):
    """One layer is used by samples with a positive first feature only, and one by nobody on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(()))
        self.odd = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, *, odd: bool) -> Tensor:
        self.seen += 1
        hidden = torch.relu(self.norm(self.first(x)))
        if odd:
            hidden = hidden + self.odd(hidden)
        found: Tensor = self.last(hidden)
        return found


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks have batches of their own sizes, and their samples weights of their own."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = SIZES[(rank + step) % len(SIZES)]
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randn(size, 4, generator=generator), torch.randint(1, 9, (size,), generator=generator)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], *, odd: bool) -> tuple[Tensor, Tensor]:
    x, y, weight = batch
    return ((model(x, odd=odd) - y).square().mean(1) * weight).sum(), weight.sum()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def single_process(steps: int, world: int) -> Tensor:
    """Train on the batches of all ranks as one."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        pairs = [loss_fn(model, batch_of(rank, step), odd=rank != 0) for rank in range(world)]
        (sum(p[0] for p in pairs) / sum(int(p[1]) for p in pairs)).backward()
        optimizer.step()
    return weights(model)


def assert_everywhere_as(expected: Tensor, model: nn.Module) -> None:
    mine = weights(model)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(one, every[0]) for one in every), "ranks have other weights"
    assert torch.allclose(mine, expected, rtol=1e-4, atol=1e-6), (mine - expected).abs().max()


def run_case(case: str) -> None:  # noqa: C901  one branch for each case
    rank, world = dist.get_rank(), dist.get_world_size()
    options = {"find_unused_parameters": True} if case == "unused" else {"static_graph": case == "static"}
    model = DistributedDataParallel(Net(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = TrainStep(model, optimizer, lambda m, b: loss_fn(m, b, odd=rank != 0))
    if case in ("oom", "unused", "static"):
        expected = single_process(4, world)
        counting = FailAt()
        with counting:
            step(batch_of(rank, 0))
        for number in range(1, 4):
            # another rank each time, early and late, once and twice in a row
            at = {1: [3], 2: [counting.count // 2, counting.count // 2 + 60], 3: [counting.count // 3]}[number]
            with FailAt(at if rank == number % world else ()):
                step(batch_of(rank, number))
        assert_everywhere_as(expected, model)
        assert step.statistics().steps == 4
    elif case == "forever":

        def never_fits(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            raise torch.OutOfMemoryError("tried to allocate 1.00 TiB")

        step = TrainStep(model, optimizer, lambda m, b: loss_fn(m, b, odd=True))
        step(batch_of(rank, 0))
        before = weights(model)
        failing = TrainStep(model, optimizer, never_fits if rank == 1 else lambda m, b: loss_fn(m, b, odd=True))
        try:
            failing(batch_of(rank, 1))
            raise AssertionError("it went through")
        except (OutOfMemoryError, RankError) as error:
            message = f"{type(error).__name__} {error}"
        assert message.startswith("OutOfMemoryError" if rank == 1 else "RankError"), message
        assert rank == 1 or "rank 1: OutOfMemoryError: " in message
        assert torch.equal(weights(model), before)
        step(batch_of(rank, 1))  # and on
        assert step.statistics().steps == 2
    elif case == "error":

        def fussy(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            if rank == 0:
                raise ValueError("a bad sample")
            return loss_fn(module, batch, odd=True)

        step = TrainStep(model, optimizer, fussy)
        try:
            step(batch_of(rank, 0))
            raise AssertionError("it went through")
        except (ValueError, RankError) as error:
            message = f"{type(error).__name__} {error}"
        assert message == "ValueError a bad sample" if rank == 0 else "rank 0: ValueError: a bad sample" in message
    elif case == "everywhere":  # one failure at every operation of a step on one rank, the collectives' own included
        with FailAt() as counting:
            step(batch_of(rank, 0))
        counts = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
        dist.all_gather(counts, torch.tensor(counting.count))
        steps = int(counts[0]) + 1
        for number in range(1, steps):
            batch = batch_of(rank, number)
            with FailAt([number] if rank == 0 else ()):
                step(batch)
        assert_everywhere_as(single_process(steps, world), model)
        assert step.statistics().steps == steps
    elif case == "bad batch":
        step = TrainStep(model, optimizer, lambda m, b: loss_fn(m, b, odd=True), accumulate=2)
        step(batch_of(rank, 0))
        try:
            step("no tensors" if rank == 0 else batch_of(rank, 1))
            step(batch_of(rank, 1))
            raise AssertionError("it went through")
        except (ValueError, RankError) as error:
            message = f"{type(error).__name__} {error}"
        assert "too many values to unpack" in message, message
        for number in range(2):
            step(batch_of(rank, number))
        assert step.statistics().steps == 1
    elif case == "ended":  # the last rank has a batch fewer
        step(batch_of(rank, 0))
        step(None if rank == world - 1 else batch_of(rank, 1))
        other = Net()
        reference = torch.optim.Adam(other.parameters(), lr=0.01)
        for number in range(2):
            reference.zero_grad()
            ranks = range(world - 1 if number else world)
            pairs = [loss_fn(other, batch_of(one, number), odd=one != 0) for one in ranks]
            (sum(p[0] for p in pairs) / sum(int(p[1]) for p in pairs)).backward()
            reference.step()
        assert_everywhere_as(weights(other), model)
    elif case == "ragged":  # in float64: weights of 1 to 8 per sample, batches of 3 to 8
        exact, alone = DistributedDataParallel(Net().double()), Net().double()
        step = TrainStep(exact, torch.optim.SGD(exact.parameters(), lr=0.0), lambda m, b: loss_fn(m, b, odd=True))
        pairs = []
        for one in range(world):
            x, y, weight = batch_of(one, 0)
            pairs.append(loss_fn(alone, (x.double(), y.double(), weight), odd=True))
            if one == rank:
                step((x.double(), y.double(), weight))
        (sum(p[0] for p in pairs) / sum(int(p[1]) for p in pairs)).backward()
        for mine, whole in zip(exact.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            assert whole.grad is not None
            assert (mine.grad - whole.grad).abs().max() < 1e-12
    elif case == "smaller":
        step(batch_of(rank, 0))
        with FailAt([3, 6] if rank == 0 else ()):
            step(batch_of(rank, 1))
        step(batch_of(rank, 2))
        assert (step.statistics().micro_batch or 0) <= 4, step.statistics()
        assert step.statistics().out_of_memory == (2 if rank == 0 else 0)
        assert_everywhere_as(single_process(3, world), model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases(run_case, *sys.argv[1:])
