"""What each rank of test_frameworks.py runs, under the real torchrun: `frameworks.py FOLDER CASE...`."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import penstock

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from end_together import run_cases

COUNT = 48


class Noisy(Dataset[Any]):
    """Sample i is i, and a number drawn at random."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, penstock.sample_rng().normal()])


def loader_of(workers: int, batch_size: int = 4, *, distributed: bool = True) -> penstock.DataLoader[Any]:
    """Return the loader that these programs train on."""
    return penstock.DataLoader(Noisy(), batch_size, shuffle=True, seed=3, num_workers=workers, distributed=distributed)


def assert_one_rank_goes_on(state: Any, rest: list[Any]) -> None:
    """Check that one process has from a state, in global batches, what the ranks have had after it."""
    alone = loader_of(0, 8, distributed=False)
    alone.load_state_dict(state)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rest)
    together = [sorted(row for batch in batches for row in batch) for batches in zip(*every, strict=True)]
    assert [sorted(batch.tolist()) for batch in alone] == together


def accelerate(folder: Path) -> None:
    """`save_state` and `load_state` of a loader that is registered."""
    from accelerate import Accelerator

    def prepared(workers: int) -> Any:
        accelerator = Accelerator(cpu=True)
        loader = loader_of(workers)
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = prepared(1)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 2:
            accelerator.save_state(str(folder / "accelerate"))
    accelerator.wait_for_everyone()
    accelerator, loader = prepared(0)
    accelerator.load_state(str(folder / "accelerate"))
    assert [batch.tolist() for batch in loader] == seen[3:]
    state = torch.load(folder / "accelerate/custom_checkpoint_0.pkl", weights_only=True)
    assert_one_rank_goes_on(state, seen[3:])
    try:
        accelerator.prepare(loader_of(0))
    except penstock.OptionError as error:
        assert "without seed= and distributed=" in str(error)  # noqa: PT017
    else:
        raise AssertionError("torch's loader has taken the place of penstock's")


def lightning(folder: Path) -> None:
    """The loader's state in Lightning's checkpoints, with DDP."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.seen.append(batch.tolist())
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.001)

    def fit(steps: int, workers: int, checkpoint: Path | None = None) -> list[Any]:
        keep = ModelCheckpoint(folder / "lightning", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        trainer = Trainer(
            max_steps=steps, accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False,
            callbacks=[keep], logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Line()
        trainer.fit(model, loader_of(workers), ckpt_path=checkpoint)
        return model.seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit(10, 1)
        saved = folder / "lightning/step=4.ckpt"
        rest = fit(10, 0, saved)
    assert len(whole) == 10
    assert rest == whole[4:]
    loops = torch.load(saved, weights_only=False)["loops"]
    (state,) = loops["fit_loop"]["state_dict"]["combined_loader"]
    assert_one_rank_goes_on(state, whole[4:6])


def accelerate_stream(folder: Path) -> None:
    """Whoever shares a stream out over ranks, it is shared out once."""
    from accelerate import Accelerator

    names = [folder / f"{number}.jsonl" for number in range(3)]
    if dist.get_rank() == 0:
        for number, name in enumerate(names):
            name.write_text("".join(f'{{"x": {16 * number + row}}}\n' for row in range(16)))
    dist.barrier()
    accelerator = Accelerator(cpu=True)
    for workers, dispatch in ((0, None), (0, False), (1, None), (1, False)):
        accelerator.dataloader_config.dispatch_batches = dispatch
        stream = penstock.open([str(name) for name in names])
        loader = accelerator.prepare(torch.utils.data.DataLoader(stream, 4, num_workers=workers))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [number for batch in loader for number in batch["x"].tolist()])
        assert sorted(number for rank in every for number in rank) == list(range(COUNT))
    accelerator.dataloader_config.dispatch_batches = False
    drawn = accelerator.prepare(torch.utils.data.DataLoader(stream.shuffle(), 4))
    try:
        next(iter(drawn))
    except penstock.OptionError as error:
        assert "give shuffle(seed=...)" in str(error)  # noqa: PT017
    else:
        raise AssertionError("each rank has shuffled the samples in an order of its own")


CASES = {"accelerate": accelerate, "accelerate_stream": accelerate_stream, "lightning": lightning}

if __name__ == "__main__":
    run_cases(lambda case: CASES[case](Path(sys.argv[1])), *sys.argv[1:])
