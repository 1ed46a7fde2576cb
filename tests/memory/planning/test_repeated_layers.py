"""Of equal layers a few run, and the plan is that of the whole model; layers that are not equal are all run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from effort import PROFILE
from llama import Llama, summed_tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import plan
from penstock.memory.planning import step_meter
from penstock.memory.planning.fake_run import MODES
from penstock.memory.planning.repeated_layers import stacks_of
from penstock.memory.planning.step_variants import Plan

pytestmark = [pytest.mark.long, pytest.mark.slow]

Case = tuple[nn.Module, Any, Any]


def planned(case: Case, **options: Any) -> Plan:
    model, loss_fn, batch = case
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return plan(model, loss_fn, batch, optimizer, budget="1GiB", **options)


def planned_whole(case: Case, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    with monkeypatch.context() as patch:
        patch.setattr(step_meter, "stacks_of", lambda model: [])
        return planned(case, **options)


def runs_few(found: Plan) -> bool:
    return any("equal layers some were run" in words for words in found.warnings)


def without_notes(found: Plan) -> Plan:
    return replace(found, warnings=())


class Layers(nn.Module):
    """Runs `count` of what `make` makes, one after the other."""

    def __init__(self, make: Callable[[int], nn.Module], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(number) for number in range(count)])
        self.head = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


class Block(nn.Module):
    def __init__(self, number: int, width: int = 32) -> None:
        super().__init__()
        self.number = number
        self.one, self.other = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.other(self.one(x).relu())
        return found


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


def llama(**options: Any) -> Case:
    model = Llama(11, width=32, heads=4, hidden=48, words=50, **options)
    return model, summed_tokens, torch.zeros(1, 8, dtype=torch.long)


class Crossing(Block):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        assert memory is not None
        return super().forward(x * memory)


class TwoStacks(nn.Module):
    """An encoder and a decoder, whose layers all get what the encoder returns."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block(number) for number in range(18)))
        self.decoder = nn.ModuleList([Crossing(number) for number in range(17)])

    def forward(self, x: Tensor) -> Tensor:
        memory, y = self.encoder(x), x
        for layer in self.decoder:
            y = layer(y, memory)
        return y


class Collecting(Layers):
    """Returns what all of its layers returned, in one tensor: what follows the layers depends on their number."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return torch.stack(found).repeat(4, 1, 1)


class Rechecking(Layers):
    """Checkpoints its layers itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        found: Tensor = self.head(x)
        return found


EQUAL: dict[str, Callable[[], Case]] = {
    "llama": lambda: llama(dtype=torch.bfloat16),
    "two stacks": lambda: (TwoStacks(), squares, torch.zeros(2, 16)),
    "checkpointed by itself": lambda: (Rechecking(Block, 12), squares, torch.zeros(2, 16)),
    "weights outweigh activations": lambda: (Layers(lambda _: Block(0, 512), 12), squares, torch.zeros(2, 16)),
    "first layer of another width": lambda: (
        Layers(lambda number: Block(number, 32 if number else 8), 12),
        squares,
        torch.zeros(2, 16),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_plan_from_a_few_layers_is_the_plan_of_all_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ("checkpointed",) if name in ("llama", "two stacks") and PROFILE != "thorough" else MODES
    found = planned(EQUAL[name](), modes=modes)
    assert runs_few(found)
    assert without_notes(found) == without_notes(planned_whole(EQUAL[name](), monkeypatch, modes=modes))


@pytest.mark.skipif(PROFILE != "thorough", reason="runs 32 layers of a large model whole; in a thorough run")
def test_the_plan_of_a_large_model_is_that_of_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        case = Llama(32, dtype=torch.bfloat16), summed_tokens, torch.zeros(2, 2048, dtype=torch.long)
    found = planned(case)
    assert runs_few(found)
    assert without_notes(found) == without_notes(planned_whole(case, monkeypatch))


class Growing(Block):
    """Computes wider the later it stands, with equal parameters."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.other(self.one(x.repeat(1 + self.number**2, 1)).relu())[: len(x)]
        return found


class Switching(Block):
    """Computes in another way in every second layer, and holds as much."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        found: Tensor = x + self.other(hidden.relu() if self.number % 2 else hidden.tanh())
        return found


class Uneven(Block):
    """Holds more in one of its layers in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).relu()
        found: Tensor = x + self.other(hidden.exp() if self.number == 7 else hidden)
        return found


class Numbered(Layers):
    """Needs to have all of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for number in range(12):
            x = self.layers[number](x)
        found: Tensor = self.head(x)
        return found


class Keeping(Layers):
    """Keeps what its layers returned until its next forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for layer in self.layers:
            x = layer(x)
            self.kept.append(x.detach().clone())
        found: Tensor = self.head(x)
        return found


def with_a_hook() -> nn.Module:
    model = Layers(Block, 12)
    model.layers[5].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


def with_shared_weights() -> nn.Module:
    model = Layers(Block, 12)
    for layer in model.layers:
        layer.get_submodule("one").weight = model.layers[0].get_submodule("one").weight
    return model


def with_one_module() -> nn.Module:
    block = Block(0)
    return Layers(lambda _: block, 12)


UNEQUAL: dict[str, Callable[[], nn.Module]] = {
    "other sizes": lambda: Layers(Growing, 12),
    "other operations": lambda: Layers(Switching, 12),
    "one that holds more": lambda: Layers(Uneven, 12),
    "all are needed": lambda: Numbered(Block, 12),
    "outputs of all layers in one": lambda: Collecting(Block, 12),
    "outputs are kept": lambda: Keeping(Block, 12),
    "a hook": with_a_hook,
    "shared weights": with_shared_weights,
    "one module": with_one_module,
    "nine": lambda: Layers(Block, 9),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_layers_that_are_not_proven_to_be_equal_are_all_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = UNEQUAL[name](), squares, torch.zeros(2, 16)
    found = planned(case, modes=("plain",))
    assert not runs_few(found)
    assert found == planned_whole(case, monkeypatch, modes=("plain",))


def test_planning_with_few_layers_leaves_the_model_as_it_was() -> None:
    model, loss_fn, batch = Layers(Block, 12), squares, torch.zeros(2, 16)
    before = [(name, id(module), module.training) for name, module in model.named_modules()]
    planned((model, loss_fn, batch))
    assert [(name, id(module), module.training) for name, module in model.named_modules()] == before
    assert not any(value for module in model.modules() for name, value in vars(module).items() if "_hooks" in name)
    assert all(param.grad is None for param in model.parameters())


def test_the_number_of_operations_does_not_grow_with_the_batch_times_the_layers() -> None:
    class Counting(Layers):
        ran = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.ran += len(self.layers)
            return super().forward(x)

    def ran(samples: int) -> int:
        Counting.ran = 0
        assert runs_few(planned((Counting(Block, 30), squares, torch.zeros(samples, 16))))
        return Counting.ran

    once = ran(2)
    assert ran(8) - once == 2 * 4 * (5 + 4)  # two more ways to cut the batch, four modes, two runs
    assert once < 5 * 30


def test_progress_counts_all_steps() -> None:
    seen: list[tuple[int, int]] = []
    planned((Layers(Block, 6), squares, torch.zeros(2, 16)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 8) for number in range(8)]


def test_frozen_layers_are_no_stack() -> None:
    model = Layers(Block, 12)
    assert [len(stack.layers) for stack in stacks_of(model)] == [12]
    model.layers.requires_grad_(False)
    assert not stacks_of(model)
