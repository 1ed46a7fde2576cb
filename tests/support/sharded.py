"""What each rank of tests/memory/test_rank_sync.py runs, under the real torchrun: `sharded.py FOLDER CASE...`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from effort import places
from end_together import run_cases
from scarcity import FailAt
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from penstock import OutOfMemoryError, RankError, TrainStep
from penstock.memory import rank_sync

SIZES = [5, 8, 3, 7]
CLIP = 0.5


def net(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(6, 2)).double()


def sharded(depth: int = 3) -> nn.Module:
    model = net(depth)
    for layer in list(model.children())[:depth]:
        fully_shard(layer)
    return fully_shard(model)


def batch_of(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Ranks have batches of their own sizes, and their samples weights of their own."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    size = SIZES[(rank + number) % len(SIZES)]
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(1, 9, (size,), generator=generator)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, weight = batch
    return (model(x).square().sum(1) * weight).sum(), weight.sum()


def step_of(model: nn.Module, loss: Any = loss_fn, **options: Any) -> TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return TrainStep(model, optimizer, loss, clip_grad_norm=CLIP, **options)


def alone(batches: list[list[tuple[Tensor, Tensor]]], depth: int = 3) -> nn.Module:
    """Train without ranks: on lists of batches, each list in one step."""
    model = net(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for together in batches:
        optimizer.zero_grad()
        pairs = [loss_fn(model, batch) for batch in together]
        (sum(pair[0] for pair in pairs) / sum(int(pair[1]) for pair in pairs)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model


def of_all_ranks(steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [[batch_of(rank, number) for rank in range(dist.get_world_size())] for number in range(steps)]


def assert_as(expected: nn.Module, model: nn.Module) -> None:
    for mine, whole in zip(model.parameters(), expected.parameters(), strict=True):
        difference = (mine.full_tensor() - whole).abs().max().item()  # type: ignore[attr-defined]
        assert difference < 1e-11, difference


def raised_by(step: TrainStep, batch: Any) -> str:
    try:
        step(batch)
    except (ValueError, OutOfMemoryError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it went through")


def whole(rank: int) -> None:
    """Ragged batches, clipped, over several windows: as without ranks."""
    step = step_of(model := sharded(), accumulate=2, micro_batch=3)
    for number in range(6):
        step(batch_of(rank, number))
    batches = of_all_ranks(6)
    assert_as(alone([batches[at] + batches[at + 1] for at in (0, 2, 4)]), model)
    assert step.statistics().steps == 3


def everywhere(rank: int) -> None:
    """One failure at any operation of one rank's later steps, FSDP's own included."""
    step = step_of(model := sharded(depth=1))
    step(batch_of(rank, 0))
    batch = batch_of(rank, 1)
    with FailAt() as counting:
        step(batch)
    counts = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(counting.count))
    failing = places(int(counts[0]), "sharded", stride=6)
    steps = 2 + len(failing)
    for number, at in enumerate(failing, start=2):
        batch = batch_of(rank, number)
        with FailAt([at] if rank == 0 else ()):
            step(batch)
    assert_as(alone(of_all_ranks(steps), depth=1), model)
    assert step.statistics().steps == steps
    assert (step.statistics().out_of_memory > len(failing) // 2) == (rank == 0), step.statistics()


def first_step(rank: int) -> None:
    """Failures in the first micro-batch of all, when nobody knows yet which collectives there are."""
    expected = alone(of_all_ranks(2))
    first, second = batch_of(rank, 0), batch_of(rank, 1)
    for at in places(150, "first step", stride=14):
        step = step_of(model := sharded())
        with FailAt([at] if rank == 1 else ()):
            step(first)
        step(second)
        assert_as(expected, model)


def oom(rank: int) -> None:
    """Another rank each time, once and twice in a row."""
    step = step_of(model := sharded())
    for number in range(5):
        batch, at = batch_of(rank, number), [[], [3], [40, 45], [100], [2, 30]][number]
        with FailAt(at if rank == number % dist.get_world_size() else ()):
            step(batch)
    assert_as(alone(of_all_ranks(5)), model)


def smaller(rank: int) -> None:
    """A rank that fails twice at a size cuts its batch, and the others cut theirs into as many parts."""

    def small(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = loss_fn(module, batch)
        if rank == 0 and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("tried to allocate 1.00 MiB")
        return found

    step = step_of(model := sharded(), small)
    for number in range(3):
        step(batch_of(rank, number))
    assert (step.statistics().micro_batch or 0) <= 4, step.statistics()
    assert (step.statistics().out_of_memory > 1) == (rank == 0), step.statistics()
    assert_as(alone(of_all_ranks(3)), model)


def cut(rank: int) -> None:
    """Failures while a batch is cut, out of memory and others, are failures like any other."""
    refuses = False

    def split(batch: tuple[Tensor, Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
        if refuses:
            raise ValueError("cannot be cut")
        return list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))

    step = step_of(model := sharded(), micro_batch=2, split=split)
    step(batch_of(rank, 0))
    batch = batch_of(rank, 1)
    with FailAt(range(3) if rank == 1 else ()):
        step(batch)
    refuses = rank == 0
    message = raised_by(step, batch_of(rank, 2))
    assert "ValueError: cannot be cut" in message, message
    refuses = False
    step(batch_of(rank, 2))
    assert_as(alone(of_all_ranks(3)), model)


def ended(rank: int) -> None:
    """The last rank has a batch fewer."""
    step = step_of(model := sharded())
    step(batch_of(rank, 0))
    last = dist.get_world_size() - 1
    step(None if rank == last else batch_of(rank, 1))
    batches = of_all_ranks(2)
    del batches[1][last]
    assert_as(alone(batches), model)


def error(rank: int, *, at: int = 1) -> None:
    """A sample that the user's code refuses on one rank is an error on all; then all go on."""
    refuses = rank == 1

    def fussy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = loss_fn(module, batch)
        if refuses:
            raise ValueError("a bad sample")
        return found

    step = step_of(model := sharded(), fussy)
    for number in range(at):
        refuses = False
        step(batch_of(rank, number))
    refuses = rank == 1
    message = raised_by(step, batch_of(rank, at))
    assert message == "ValueError: a bad sample" if rank == 1 else "rank 1: ValueError: a bad sample" in message, (
        message
    )
    refuses = False
    if RECOVERS:
        step(batch_of(rank, at))
        assert_as(alone(of_all_ranks(at + 1)), model)


def bad_batch(rank: int) -> None:
    step = step_of(model := sharded())
    step(batch_of(rank, 0))
    assert raised_by(step, "no tensors" if rank == 0 else batch_of(rank, 1))
    step(batch_of(rank, 1))
    assert_as(alone(of_all_ranks(2)), model)


def gives_up(rank: int) -> None:
    """A single sample does not fit on one rank: an error on all, and the weights are as before."""
    is_full = False

    def full(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = loss_fn(module, batch)
        if is_full:
            raise torch.OutOfMemoryError("tried to allocate 1.00 TiB")
        return found

    step = step_of(model := sharded(), full)
    step(batch_of(rank, 0))
    is_full = rank == 1
    message = raised_by(step, batch_of(rank, 1))
    assert message.startswith("OutOfMemoryError: memory ran out" if rank == 1 else "RankError"), message
    assert rank == 1 or "rank 1: OutOfMemoryError: memory ran out: 1024.0 GiB more was needed" in message, message
    if RECOVERS:
        assert_as(alone(of_all_ranks(1)), model)
        is_full = False
        step(batch_of(rank, 1))
        assert_as(alone(of_all_ranks(2)), model)


def old_torch(rank: int) -> None:
    """Where torch cannot reset a model after an interrupted micro-batch, all ranks raise."""
    rank_sync.CollectiveSchedule.can_reset = lambda self: False  # type: ignore[method-assign]
    is_full = False

    def full(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        found = loss_fn(module, batch)
        if is_full:
            raise torch.OutOfMemoryError("tried to allocate 1.00 MiB")
        return found

    step = step_of(sharded(), full)
    step(batch_of(rank, 0))
    is_full = rank == 1
    message = raised_by(step, batch_of(rank, 1))
    assert "cannot reset (2.13 can); begin with a smaller micro_batch=" in message, message
    assert message.startswith("OutOfMemoryError" if rank == 1 else "RankError"), message


RECOVERS = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")
CASES = {
    "whole": whole,
    "everywhere": everywhere,
    "first step": first_step,
    "oom": oom,
    "smaller": smaller,
    "cut": cut,
    "ended": ended,
    "error": error,
    "first error": lambda rank: error(rank, at=0),
    "bad batch": bad_batch,
    "gives up": gives_up,
    "old torch": old_torch,
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "batches are cut from now on, and the ranks of a sharded model")
    torch.set_num_threads(1)
    run_cases(lambda case: CASES[case](dist.get_rank()), *sys.argv[1:])
