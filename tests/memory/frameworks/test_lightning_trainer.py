"""Lightning's automatic optimization ends with the weights and logs that it has without a failure."""

from __future__ import annotations

import importlib.util
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import FRAMEWORKS, recipe
from scarcity import FailAt
from torch import Tensor, nn

from penstock import OptionError, survive_oom

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Notes:
    """Notes which operations are a module's own: those in its forward, its backward and its optimizer's step."""

    def __init__(self, mode: FailAt) -> None:
        self.mode = mode
        self.own: list[int] = []

    def __enter__(self) -> None:
        self._began = self.mode.count

    def __exit__(self, *_: object) -> None:
        self.own += range(self._began, self.mode.count)


def module_of(notes: Notes, dropout: float, extra: bool = False) -> Any:
    import lightning
    import torchmetrics

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1)).double()
            self.error = torchmetrics.MeanAbsoluteError()
            self.seen = 0
            self.clipping = Notes(notes.mode)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            with self.clipping:
                super().configure_gradient_clipping(*args, **kwargs)

        def training_step(self, batch: Any, number: int) -> Any:
            with notes:
                x, y = batch
                self.seen += len(x)
                found = self.net(x)
                loss = nn.functional.mse_loss(found, y)
                self.error(found, y)
                self.log("error", self.error, on_epoch=True)
                self.log("loss", loss, on_epoch=True, on_step=False)
                return {"loss": loss, "found": found.detach()} if extra else loss

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            with notes:
                super().backward(loss, *args, **kwargs)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            own_step = optimizer.step

            def step(self: Any, closure: Any = None) -> Any:
                with torch.enable_grad():
                    loss = closure() if closure is not None else None
                with notes:
                    own_step()
                return loss

            optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression()


def fitted(fail_at: Any = (), dropout: float = 0.0, options: Any = None, extra: bool = False, **arguments: Any) -> Any:
    """Return the module, what was logged, and which operations were its own."""
    import lightning

    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(30, size, generator=generator, dtype=torch.float64) for size in (6, 1)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 8)
    mode = FailAt(fail_at)
    notes = Notes(mode)
    module = module_of(notes, dropout, extra)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **QUIET, **arguments)
    if options is not None:
        assert survive_oom(trainer, **options) is trainer
    torch.manual_seed(1)
    with mode:
        trainer.fit(module, loader)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}, notes.own


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
    own = fitted([], 0.5, {}, **ARGUMENTS[case])[2]
    for number in own[len(own) // 3 :: len(own) // 4]:
        found = fitted([number], 0.5, {}, **ARGUMENTS[case])
        assert largest_difference(found, expected) == 0
        assert found[1] == expected[1]
        assert found[0].seen == expected[0].seen == 30


def test_a_failure_while_gradients_are_clipped_changes_nothing() -> None:
    arguments = ARGUMENTS["accumulated and clipped"]
    expected = fitted(options={}, **arguments)
    operations = expected[0].clipping.own
    for number in operations[:: len(operations) // 3]:
        found = fitted([number], options={}, **arguments)
        assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("case", ["plain", "accumulated and clipped"])
def test_a_cut_batch_has_the_gradients_and_means_of_the_whole_one(case: str) -> None:
    expected = fitted(extra=True, **ARGUMENTS[case])
    found = fitted(options={"micro_batch": 3}, extra=True, **ARGUMENTS[case])
    assert len(found[2]) > len(expected[2])  # it was cut
    assert largest_difference(found, expected) < 1e-10  # sums in another order
    means = {name: value for name, value in expected[1].items() if name in ("loss", "error_epoch")}
    assert {name: found[1][name] for name in means} == pytest.approx(means, rel=1e-6)  # a metric in float32


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


def test_several_devices_are_refused() -> None:
    import lightning

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", **QUIET)
    with pytest.raises(OptionError, match="runs with DDPStrategy"):
        survive_oom(trainer)


def test_a_weight_that_was_said_wrongly_is_refused() -> None:
    with pytest.raises(OptionError, match=r"would be cut into micro-batches, and .* other gradients"):
        fitted(options={"micro_batch": 4, "weight": "sum"})


def test_the_page_runs() -> None:
    exec(compile(recipe("Lightning", FRAMEWORKS), str(FRAMEWORKS), "exec"), {"__name__": "a_page"})
