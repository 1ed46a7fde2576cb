"""Train on several GPUs (or CPU processes), and resume in the middle of an epoch, also on another number of them.

    torchrun --nproc-per-node 2 examples/ddp_resume.py data/digits/train --stop-after 30
    torchrun --nproc-per-node 1 examples/ddp_resume.py data/digits/train       # resumes after step 30

`distributed=True` shares the samples out over the ranks: no DistributedSampler, no set_epoch. The loader's state goes
into the checkpoint. --global-batch stays the same, so steps have the samples of an uninterrupted run.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import as_floats, make_model  # this folder's
from torch.nn.parallel import DistributedDataParallel

import penstock


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, default=1 << 30, metavar="STEP", help="as a preempted job does")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    torch.manual_seed(0)

    loader: penstock.DataLoader[Any] = penstock.DataLoader(
        penstock.open(args.folder, size=32), args.global_batch // world, shuffle=True,
        num_workers=args.workers, distributed=True, seed=0, device=device,
    )  # fmt: skip
    model = make_model(len([entry for entry in args.folder.iterdir() if entry.is_dir()]), depth=14).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epoch = step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        epoch, step = saved["epoch"], saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    parallel = DistributedDataParallel(model)
    for epoch in range(epoch, args.epochs):  # noqa: B020  from the epoch that was begun
        for batch in loader:
            loss = F.cross_entropy(parallel(as_floats(batch["image"])), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and (step % args.every == 0 or step == args.stop_after):
                state = {"epoch": epoch, "step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "loader": loader.state_dict()}, args.checkpoint)
            if step == args.stop_after:
                break
        if rank == 0:
            print(f"epoch {epoch}, step {step}: loss {loss.item():.3f}", flush=True)
        if step == args.stop_after:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
