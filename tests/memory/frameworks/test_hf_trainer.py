"""Hugging Face's Trainer ends with the weights and logs that it has without a failure."""

from __future__ import annotations

import importlib.util
import random
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
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

Sample = dict[str, Any]
SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def language_model(dropout: float) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**SMALL, **tokens, num_key_value_heads=2, attention_dropout=dropout))


def masked_model(dropout: float) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForMaskedLM(BertConfig(**SMALL, **rates))


def classifier(dropout: float) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**SMALL, **rates))


def router(dropout: float) -> Any:
    """Return a mixture of experts, whose loss has a term that couples all tokens of a batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 1.0,
    }
    return MixtralForCausalLM(MixtralConfig(**SMALL, **sizes, attention_dropout=dropout))


class LowRank(nn.Module):
    """What PEFT puts in the place of a linear layer: that, frozen, and two narrow ones."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(self.dropout(x)))
        return found


def adapted(dropout: float) -> Any:
    model = language_model(dropout).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj, dropout)
    return model


def samples(model: Any) -> list[Sample]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(16):
        ids = torch.randint(1, 50, (10,), generator=generator)
        labels: Any = ids.clone()
        labels[1 + number % 2 : 2 + int(torch.randint(1, 7, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": number % 2 if model is classifier else labels})
    return found


class Failing:
    """Is the base of a Trainer whose steps fail at these operations, counted over the whole training."""

    mode: FailAt

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]


def trained(make: Any, *, fail_at: Any = (), dropout: float = 0.0, options: Any = None, **arguments: Any) -> Any:
    """Train for an epoch of four batches, or more steps; unguarded without options."""
    from transformers import Trainer, TrainingArguments

    kind = type("FailingTrainer", (Failing, Trainer), {"mode": FailAt(fail_at)})
    own = {key: arguments.pop(key) for key in ("compute_loss_func", "optimizers") if key in arguments}
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "learning_rate": 1e-2}
    torch.manual_seed(0)
    model = make(dropout) if make is router else make(dropout).double()
    trainer = kind(
        model, TrainingArguments("out", **quiet, **{**settings, **arguments}), train_dataset=samples(make), **own
    )
    if options is not None:
        survive_oom(trainer, **options)
    trainer.train()
    return trainer


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "label smoothing": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    "bf16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_failures_in_the_middle_of_an_epoch_change_nothing(case: str) -> None:
    expected = trained(language_model, dropout=0.2, **ARGUMENTS[case])
    count = expected.mode.count
    found = trained(language_model, dropout=0.2, fail_at=[count // 3, count], options={}, **ARGUMENTS[case])
    assert found.mode.count > count + 1  # what failed was run again
    assert largest_difference(found, expected) == 0
    assert losses(found) == losses(expected)


@pytest.mark.parametrize("make", [masked_model, classifier, adapted])
def test_other_models_survive_too(make: Any) -> None:
    expected = trained(make, dropout=0.2, gradient_accumulation_steps=2)
    count = expected.mode.count
    found = trained(make, dropout=0.2, fail_at=[count // 2, count - 9], options={}, gradient_accumulation_steps=2)
    assert largest_difference(found, expected) == 0
    assert losses(found) == losses(expected)


def weighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    each = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    found: Tensor = each / num_items_in_batch
    return found


@pytest.mark.parametrize(
    ("make", "case"),
    [
        *((make, "accumulated") for make in (language_model, masked_model, classifier)),
        (adapted, "label smoothing"),
        (language_model, "a loss of one's own"),
    ],
)
def test_a_cut_batch_has_the_gradients_of_the_whole_one(make: Any, case: str) -> None:
    arguments = ARGUMENTS.get(case, {"gradient_accumulation_steps": 2, "compute_loss_func": weighted})
    expected = trained(make, **arguments)
    found = trained(make, options={"micro_batch": 3}, **arguments)
    assert found.mode.count > expected.mode.count  # it was cut
    assert largest_difference(found, expected) < 1e-10  # sums in another order
    assert len(losses(found)) == len(losses(expected))


def test_many_random_failures_leave_the_weights_of_a_run_without_any() -> None:
    expected = trained(language_model, num_train_epochs=3, gradient_accumulation_steps=2, max_grad_norm=0.1)
    count = expected.mode.count
    drawn = random.Random(7).sample(range(count), count // 1000)
    found = trained(
        language_model, fail_at=drawn, options={}, num_train_epochs=3, gradient_accumulation_steps=2, max_grad_norm=0.1
    )
    assert found.mode.count > count  # what failed was run again
    assert largest_difference(found, expected) < 1e-8


def test_a_step_of_the_optimizer_that_fails_is_taken_up() -> None:
    mode = FailAt()

    class Short(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            with mode:
                return super().step(closure)

    def make(options: Any) -> Any:
        torch.manual_seed(0)
        model = language_model(0.0).double()
        optimizer = Short(model.parameters(), lr=1e-2)
        return trained(lambda _: model, optimizers=(optimizer, None), options=options)

    expected = make(None)
    for number in (5, 9):  # in the first step: later ones are copied once memory has run out
        mode = FailAt([number])
        assert largest_difference(make({}), expected) == 0


def test_a_routers_loss_is_not_cut() -> None:
    with pytest.raises(OptionError, match="would be cut into micro-batches, and 2 samples in 2 parts have other"):
        trained(router, options={"micro_batch": 2})


def test_what_a_trainer_cannot_put_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(classifier, max_steps=1)
    for kind in ("DEEPSPEED", "FSDP", "MULTI_GPU"):
        with monkeypatch.context() as patch:
            patch.setattr(trainer.accelerator.state, "distributed_type", kind)
            with pytest.raises(OptionError, match=f"runs with {kind}"):
                survive_oom(trainer)
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    with pytest.raises(OptionError, match="runs DataParallel over several GPUs"):
        survive_oom(trainer)
    with pytest.raises(OptionError, match="takes a Trainer of transformers or Lightning, not a Linear"):
        survive_oom(nn.Linear(1, 1))


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a thread stays
    exec(compile(recipe("Hugging Face Trainer", FRAMEWORKS), str(FRAMEWORKS), "exec"), {"__name__": "a_page"})
