"""Lightning's automatic optimization ends with the weights and logs that it has without a failure."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from scarcity import FailAt
from torch import Tensor, nn

from penstock import OptionError, OutOfMemoryError, survive_oom

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
WORK = ("training_step", "backward", "step")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def module_of(mode: FailAt, dropout: float, extra: bool = False) -> Any:
    """Return a module whose forward, backward and optimizer's step are counted, and fail, by `mode`."""
    import lightning
    import torchmetrics

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1)).double()
            self.error = torchmetrics.MeanAbsoluteError()
            self.seen = 0

        def training_step(self, batch: Any, number: int) -> Any:
            with mode:
                x, y = batch
                self.seen += len(x)
                found = self.net(x)
                loss = nn.functional.mse_loss(found, y)
                self.error(found, y)
                self.log("error", self.error, on_epoch=True)
                self.log("loss", loss, on_epoch=True, on_step=False)
                return {"loss": loss, "found": found.detach()} if extra else loss

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with mode:
                super().backward(loss, *args, **kwargs)

        def configure_optimizers(self) -> Any:
            class Counted(torch.optim.AdamW):
                def step(self, closure: Any = None) -> Any:
                    with torch.enable_grad():
                        loss = closure() if closure is not None else None
                    with mode:
                        super().step()
                    return loss

            kind = torch.optim.AdamW if extra else Counted
            optimizer = kind(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression()


def fitted(fail_at: Any = (), dropout: float = 0.0, options: Any = None, extra: bool = False, **arguments: Any) -> Any:
    """Return the module, what was logged, and how many operations were counted."""
    import lightning

    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(30, size, generator=generator, dtype=torch.float64) for size in (6, 1)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 8)
    mode = FailAt(fail_at)
    module = module_of(mode, dropout, extra)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **QUIET, **arguments)
    if options is not None:
        assert survive_oom(trainer, **options) is trainer
    torch.manual_seed(1)
    trainer.fit(module, loader)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}, mode.count


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(one[0].parameters(), other[0].parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_failures_in_the_middle_of_an_epoch_change_nothing(case: str) -> None:
    expected = fitted(dropout=0.5, **ARGUMENTS[case])
    count = expected[2]
    for fail_at in ([count // 2], [count // 2 + 9], [count // 3, count - 5]):
        found = fitted(fail_at, 0.5, {}, **ARGUMENTS[case])
        assert largest_difference(found, expected) == 0
        assert found[1] == expected[1]
        assert found[0].seen == expected[0].seen == 30


@pytest.mark.parametrize("case", ["plain", "accumulated and clipped"])
def test_a_cut_batch_has_the_gradients_and_means_of_the_whole_one(case: str) -> None:
    expected = fitted(extra=True, **ARGUMENTS[case])
    found = fitted(options={"micro_batch": 3}, extra=True, **ARGUMENTS[case])
    assert 0 < largest_difference(found, expected) < 1e-12  # sums in another order
    assert found[1] == pytest.approx(expected[1], rel=1e-12)


def test_what_a_step_returns_beside_its_loss_is_joined_or_the_batch_is_not_cut() -> None:
    import lightning

    class Noting(lightning.Callback):
        rows: list[int]

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.rows.append(len(outputs["found"]))

    noting = Noting()
    noting.rows = []
    fitted(options={"micro_batch": 3}, extra=True, callbacks=[noting])
    assert noting.rows == [8, 8, 8, 6]


def test_several_devices_are_refused_and_so_is_a_step_without_its_batch() -> None:
    import lightning

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **QUIET)
    with pytest.raises(OptionError, match="runs with DDPStrategy"):
        survive_oom(trainer)


def test_a_step_that_couples_samples_is_not_cut() -> None:
    with pytest.raises(OutOfMemoryError, match="was not cut: .* other gradients"):
        fitted(options={"micro_batch": 4, "weight": "sum"})
