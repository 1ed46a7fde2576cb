"""What each rank of tests/distributed/test_training.py runs, under the real torchrun: `training.py FOLDER OPTIONS`.

It trains on 96 numbers in global batches of 24, from the last checkpoint in FOLDER if there is one, and leaves what it
has seen in FOLDER/log.WORLD.RANK.ATTEMPT. OPTIONS is a JSON object; see `main`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import end_together

COUNT, GLOBAL_BATCH = 96, 24


class Points(Dataset[Any]):
    """Points with a bit of noise of their own."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if index == self.bad:
            raise ValueError(f"sample {index} is broken")
        noise = torch.from_numpy(penstock.sample_rng().normal(size=4))
        return index, torch.sin(torch.arange(4, dtype=torch.float64) * index) + 0.1 * noise


def main(folder: Path, *, epochs: int = 2, workers: int = 1, bad: int | None = None, **more: Any) -> None:
    """Train.

    Args:
        folder: for the checkpoint and the logs.
        epochs: to train.
        workers: of each rank.
        bad: a sample that raises.
        more: `stop` after so many steps of this run; `kill` rank 1 at this step of the first attempt; `shard` the
            model (FSDP2) instead of replicating it; with four ranks, `wait` at this step, two of them for the others.
    """
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    wrapped: Any = fully_shard(model) if more.get("shard") else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = penstock.DataLoader(
        Points(bad), GLOBAL_BATCH // world, shuffle=True, num_workers=workers, distributed=True, seed=7
    )
    epoch = step = 0
    losses: list[float] = []
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        epoch, step, losses = saved["epoch"], saved["step"], saved["losses"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    seen: list[tuple[int, list[int]]] = []
    stop = step + more.get("stop", 1000)
    while epoch < epochs and step < stop:
        for indices, points in loader:
            loss = wrapped(points).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach() / world
            dist.all_reduce(total)
            losses.append(float(total))
            seen.append((step, indices.tolist()))
            step += 1
            state = {"epoch": epoch, "step": step, "losses": losses, "loader": loader.state_dict()}
            if rank == 0 and not more.get("shard"):
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / "new")
                (folder / "new").replace(checkpoint)
            (folder / f"log.{world}.{rank}.{attempt}").write_text(json.dumps(seen))
            dist.barrier()
            if step == more.get("kill") and rank == 1 and attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == more.get("wait") and world == 4:
                (folder / f"waits.{rank}").touch()
                if rank >= 2:
                    signal.pause()  # until the machine is shot
                dist.barrier()
            if step == stop:
                break
        else:
            epoch += 1
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    if rank == 0:
        flat = torch.cat([weight.detach().flatten() for weight in weights]).tolist()
        (folder / "result").write_text(json.dumps({"losses": losses, "weights": flat}))
    end_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
