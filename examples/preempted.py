"""Stop at the same step on all ranks when the scheduler asks for it, save, and go on from there when run again.

    torchrun --nproc-per-node 2 examples/preempted.py     # kill -TERM one of its processes, and run it again

A SLURM job that is asked two minutes before its time ends, and queues itself again:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --time=4:00:00 --requeue --open-mode=append
    #SBATCH --signal=B:USR1@120                         # to this script
    trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1   # torchrun hands SIGTERM on
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    srun torchrun --nnodes 2 --nproc-per-node 8 --shutdown-timeout 100 --rdzv-backend c10d \\
        --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$(scontrol show hostnames | head -n 1):29500" examples/preempted.py &
    while ! wait; do :; done                            # the signal interrupts `wait`
    [ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"

With one process per GPU (`--ntasks-per-node=8`), and no torchrun, the lines of srun are:

    export MASTER_ADDR="$(scontrol show hostnames | head -n 1)" MASTER_PORT=29500
    srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \\
        exec python examples/preempted.py' &
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import penstock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("preempted"))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=10, help="of each rank; may change between runs")
    parser.add_argument(
        "--try", dest="attempt", metavar="RANK:STEP:SIGNAL", help="send a rank a signal, as 1:5:SIGTERM"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, step = dist.get_rank(), 0
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    loader = penstock.DataLoader(
        torch.arange(float(args.samples)), args.batch_size, shuffle=True, num_workers=1, distributed=True, seed=0
    )
    args.folder.mkdir(exist_ok=True)
    checkpoint = args.folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    parallel, seen, stopped = DistributedDataParallel(model), [], False
    for batch in loader:
        parallel(batch[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += batch.tolist()
        step += 1
        if args.attempt and args.attempt.startswith(f"{rank}:{step}:"):
            os.kill(os.getpid(), getattr(signal, args.attempt.split(":")[2]))
        if stopped := loader.stop_requested():
            break
    if stopped and rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "loader": loader.state_dict()}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
    (args.folder / f"seen.{step}.{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    print(f"rank {rank}: {'stopped' if stopped else 'finished'} after step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
