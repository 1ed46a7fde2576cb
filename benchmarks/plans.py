"""What plans are worth: `python -m benchmarks.plans [--models ...] [--json FILE [--resume]]`.

For ten models, up to 7 billion parameters on a GPU, the plan's predicted peak is compared with the allocator's
`max_memory_allocated` of a real step (target: within 5 %). Then it is planned for the budget that this takes, and the
model is made anew in a process that may use no more (`set_per_process_memory_fraction`): the micro-batch that is
recommended has to run, twice of it (if the batch is so large) has to end with an out-of-memory. Anew, because after
larger steps what stays lies between blocks that were freed, and torch's allocator cannot give back the rest of such a
segment. Without a GPU only the predictions are made (for tests, with --tiny).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine_facts import facts_with_gpu
from benchmarks.row_file import RowFile, add_options
from penstock import OutOfMemoryError, TrainStep, plan
from penstock.core.units import size_text
from penstock.memory.planning.step_variants import StepVariant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Batch = tuple[Tensor, Tensor]
VOCABULARY = 32_000


class Gpt(nn.Module):
    """A decoder of this width, depth and number of heads."""

    def __init__(self, width: int, depth: int, heads: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True, dtype=dtype
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        found: Tensor = self.head(x[:, -1])
        return found


class Recurrent(nn.Module):
    """An LSTM over sequences of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embedding(tokens))[0][:, -1])
        return found


def _convolutions(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.GroupNorm(4, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def _volumes(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv3d(width, 2 * width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def _perceptron(width: int, depth: int) -> nn.Module:
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _floats(size: int, *shape: int) -> Batch:
    return torch.randn(size, *shape), torch.randint(0, 10, (size,))


def _tokens(size: int, length: int) -> Batch:
    return torch.randint(0, VOCABULARY, (size, length)), torch.randint(0, 10, (size,))


BF16 = torch.bfloat16
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "MLP": (lambda: _perceptron(4096, 4), lambda: _floats(64, 256, 4096)),
    "deep MLP": (lambda: _perceptron(1024, 48), lambda: _floats(64, 256, 1024)),
    "CNN": (lambda: _convolutions((64, 128, 256, 512)), lambda: _floats(64, 3, 224, 224)),
    "3-D CNN": (lambda: _volumes(32), lambda: _floats(16, 3, 16, 112, 112)),
    "LSTM": (lambda: Recurrent(1024), lambda: _tokens(64, 256)),
    "GPT 120M": (lambda: Gpt(768, 12, 12), lambda: _tokens(64, 512)),
    "GPT 350M": (lambda: Gpt(1024, 24, 16), lambda: _tokens(32, 512)),
    "GPT 1.3B": (lambda: Gpt(2048, 24, 16), lambda: _tokens(16, 512)),
    "GPT 2.7B bf16": (lambda: Gpt(2560, 32, 32, BF16), lambda: _tokens(16, 512)),
    "GPT 7B bf16": (lambda: Gpt(4096, 34, 32, BF16), lambda: _tokens(8, 512)),
}
TINY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "MLP": (lambda: _perceptron(64, 2), lambda: _floats(64, 64)),
    "CNN": (lambda: _convolutions((8, 8)), lambda: _floats(8, 3, 16, 16)),
}


def _loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    found = model(batch[0]).float()
    found = found.mean(1) if found.dim() == 3 else found
    return nn.functional.cross_entropy(found, batch[1], reduction="sum"), len(batch[0])


def row(make: Callable[[], nn.Module], batch_of: Callable[[], Batch]) -> dict[str, Any]:
    """Return what is predicted for a batch in four parts; on a GPU, what a step took, and what runs in that budget."""
    model, batch, optimizer = _made(make, batch_of)
    found = plan(model, _loss, batch, optimizer, budget="1000TiB", modes=("plain",))
    quarter = next(one for one in found.variants if one.parts == 4)
    said: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "micro_batch": quarter.micro_batch,
        "predicted": quarter.peak_nbytes,
    }
    if DEVICE.type != "cuda":
        return said
    step = _steps(model, optimizer, batch, quarter.micro_batch)
    torch.cuda.reset_peak_memory_stats()
    step()
    said["measured"] = torch.cuda.max_memory_allocated()
    said["error"] = quarter.peak_nbytes / said["measured"] - 1
    del step, model, batch, optimizer
    budget = int(found.needed_nbytes(quarter) * 1.01)
    model, batch, optimizer = _made(make, batch_of)
    choice = plan(model, _loss, batch, optimizer, budget=budget, modes=("plain",)).choice
    del model, batch, optimizer
    if choice is None:
        return {**said, "budget": budget, "recommended": None}
    return {**said, "budget": budget, "recommended": choice.micro_batch, **_in_budget(make, batch_of, choice, budget)}


def _made(
    make: Callable[[], nn.Module], batch_of: Callable[[], Batch]
) -> tuple[nn.Module, Batch, torch.optim.Optimizer]:
    """Return a model, its batch and its optimizer, on a GPU of which this process uses nothing else."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    with DEVICE:
        model, batch = make(), batch_of()
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _in_budget(
    make: Callable[[], nn.Module], batch_of: Callable[[], Batch], choice: StepVariant, budget: int
) -> dict[str, bool]:
    """Return what runs in a process that may have no more than a budget."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
    try:
        model, batch, optimizer = _made(make, batch_of)
        found = {"recommended_runs": _runs(model, optimizer, batch, choice.micro_batch)}
        if 2 * choice.micro_batch <= len(batch[0]):
            found["twice_runs"] = _runs(model, optimizer, batch, 2 * choice.micro_batch)
        return found
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, micro_batch: int) -> Callable[[], object]:
    """Return a step that has been taken once, so that the optimizer has its state."""
    step = TrainStep(model, optimizer, _loss, micro_batch=micro_batch)

    def taken() -> None:
        step(batch)
        torch.cuda.synchronize()

    taken()
    return taken


def _runs(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, micro_batch: int) -> bool:
    """Return whether steps as large as this run: the first allocates the optimizer's state, the second has it."""
    try:
        for _ in range(2):
            for first in range(0, len(batch[0]), micro_batch):  # by hand: a TrainStep would survive it
                part = (batch[0][first : first + micro_batch], batch[1][first : first + micro_batch])
                _loss(model, part)[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, OutOfMemoryError):
        return False
    finally:
        optimizer.zero_grad(set_to_none=True)
    return True


def main() -> int:
    """Measure, print, write; return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="two small models, for a test")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    add_options(parser)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "benchmark": "plans", "sizes": "tiny" if asked.tiny else "full", "machine": facts_with_gpu(), "models": []
    }  # fmt: skip
    file = RowFile(asked, found)
    for name, (make, batch_of) in TINY.items() if asked.tiny else ((name, MODELS[name]) for name in asked.models):
        file.add("models", {"name": name}, lambda make=make, batch_of=batch_of: row(make, batch_of))
        _print(found["models"][-1])
    errors = [abs(one["error"]) for one in found["models"] if "error" in one]
    worst = f"off by {max(errors):.1%} at most (target 5 %)" if errors else "not compared: there is no GPU"
    print(f"plans: {len(found['models'])} models; {worst}; {found['seconds']:.0f} s")
    return file.exit_code()


def _print(one: dict[str, Any]) -> None:
    if "failed" in one:
        return
    words = f"{one['name']}: {size_text(one['predicted'])} predicted in parts of {one['micro_batch']}"
    if "measured" in one:
        words += f", {size_text(one['measured'])} measured; in a budget of {size_text(one['budget'])}, "
        words += f"{one['recommended']} {'runs' if one.get('recommended_runs') else 'DOES NOT RUN'}"
        if "twice_runs" in one:
            words += f", twice of it {'RUNS' if one['twice_runs'] else 'does not'}"
    print(words, flush=True)


if __name__ == "__main__":
    sys.exit(main())
