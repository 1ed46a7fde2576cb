"""What each rank of test_titan.py runs: torchtitan's own trainer, with penstock's loader in its dataloader's place.

`titan.py FOLDER STEPS TP PP`, under torchrun; TP x PP ranks are one replica. The debug model, stages, FSDP2, the
loop and the checkpoints are torchtitan's own, on CPUs (see titan_on_cpu.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from titan_on_cpu import take_microbatches, use_sums_only
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import end_together

COUNT, LENGTH, GLOBAL_BATCH = 56, 16, 8


class Sequences(Dataset[Any]):
    """Sequence i begins with token i."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens = (torch.arange(LENGTH + 1) + index) % 2048
        return {"input": tokens[:-1]}, tokens[1:]


class PenstockDataLoader(BaseDataLoader):
    """penstock's loader in torchtitan's seam; epochs follow each other without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        workers: int = 1

    def __init__(
        self, config: Config, *, local_batch_size: int, dp_rank: int, dp_world_size: int, **others: Any
    ) -> None:
        places = [0] * dist.get_world_size()
        dist.all_gather_object(places, dp_rank)
        ranks = sorted(range(len(places)), key=places.__getitem__)  # replica by replica, wherever its ranks are
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(dp_world_size, -1), mesh_dim_names=("dp", "replica"))
        self.loader = penstock.DataLoader(
            Sequences(), local_batch_size, shuffle=True, seed=1, num_workers=config.workers, distributed=mesh["dp"]
        )
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:
                self.seen.extend(batch[0]["input"][:, 0].tolist())
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)


class NoTokenizer(BaseTokenizer):
    """What there are no texts for."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def main(folder: Path, steps: int, tensor: int, pipeline: int) -> None:
    """Train until step `steps`, from the checkpoint that is there, and write what this rank has got."""
    world = int(os.environ["WORLD_SIZE"])
    config: Trainer.Config = llama3_debugmodel()
    config.dump_folder = str(folder)
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = PenstockDataLoader.Config(workers=1 if steps < 9 else 0)
    config.training.local_batch_size = GLOBAL_BATCH * tensor * pipeline // world
    config.parallelism.tensor_parallel_degree = tensor
    config.parallelism.pipeline_parallel_degree = pipeline
    config.training.seq_len = LENGTH
    config.training.steps = steps
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable = True
    config.checkpoint.interval = 3
    config.activation_checkpoint = FullAC.Config()
    config.validator.enable = False
    trainer = config.build()
    use_sums_only(trainer.model_parts)
    if pipeline > 1:
        take_microbatches(trainer.pp_schedule)
    trainer.train()
    assert trainer.step == steps
    digest = trainer.dataloader.loader.statistics().index_digests[-1]
    found = {"seen": trainer.dataloader.seen, "digest": [digest.epoch, digest.batches, digest.digest, digest.start]}
    Path(folder, f"{world}.{steps}.{dist.get_rank()}.json").write_text(json.dumps(found))
    trainer.close()
    end_together()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
