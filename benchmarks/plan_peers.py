"""Plans beside other estimates: `python -m benchmarks.plan_peers [--json FILE]`.

The peak of a training step as torch's profiler counts it on the CPU, from below all operations, and what is said before
it runs: by `penstock.plan`; by Accelerate's estimate-memory; by DeepSpeed's estimator (ZeRO 2 on one GPU); and by
torch's MemTracker on fake tensors, with which torchtitan estimates. Models are built from configurations, without
weights. Needs `pip install transformers accelerate deepspeed`; what is missing is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.machine_facts import facts
from benchmarks.table import estimate_text
from penstock import plan
from penstock.core.units import size_text

Step = tuple[nn.Module, Any, Any, torch.optim.Optimizer]
ESTIMATES = ("penstock", "Accelerate", "DeepSpeed", "MemTracker")


def _outputs_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    size = len(batch["labels"])
    return model(**batch).loss * size, size


def _text(kind: str, size: int, length: int, dtype: torch.dtype = torch.float32, **config: Any) -> Step:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(vocab_size=2000, use_cache=False, **config)
    names = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = getattr(transformers, names.get(kind, "T5ForConditionalGeneration"))(settings).train()
    finally:
        torch.set_default_dtype(default)
    tokens = torch.randint(1, 2000, (size, length))
    return model, _outputs_loss, {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(model.parameters())


def _image(kind: str, **config: Any) -> Step:
    import transformers

    settings = getattr(transformers, f"{kind}Config")(num_labels=10, **config)
    model = getattr(transformers, f"{kind}ForImageClassification")(settings).train()
    batch = {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 10, (16,))}
    return model, _outputs_loss, batch, torch.optim.AdamW(model.parameters())


class _Dense(nn.Module):
    def __init__(self, width: int, growth: int = 16) -> None:
        super().__init__()
        self.grow = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow(x)], 1)


def _dense() -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), *(_Dense(32 + 16 * place) for place in range(6))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    batch = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

    return model, loss_fn, batch, torch.optim.Adafactor(model.parameters())


WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 1024}
STEPS: dict[str, Callable[[], Step]] = {
    "GPT-2": lambda: _text("GPT2", 8, 128, n_embd=256, n_layer=4, n_head=4),
    "Llama, bf16": lambda: _text("Llama", 8, 128, torch.bfloat16, **WIDE),
    "BERT": lambda: _text("Bert", 8, 128, **WIDE),
    "T5": lambda: _text(
        "T5", 8, 128, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, decoder_start_token_id=0
    ),
    "ViT": lambda: _image("ViT", image_size=64, patch_size=8, **WIDE),
    "ResNet": lambda: _image("ResNet", embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]),
    "DenseNet, Adafactor": _dense,
}


def counted(step: Step) -> int:
    """Return the most bytes of a second step."""
    model, loss_fn, batch, optimizer = step

    def run() -> None:
        loss_fn(model, batch)[0].backward()
        optimizer.step()

    run()
    optimizer.zero_grad()
    gc.collect()
    held = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    held += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    live, most = 0, 0
    assert found.profiler is not None
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most + sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in held}.values())


def estimates(make: Callable[[], Step]) -> dict[str, int | None]:
    """Return what is estimated before a step runs, in bytes; None where an estimator is missing or fails."""
    model, loss_fn, batch, optimizer = make()
    found = plan(model, loss_fn, batch, optimizer, budget="1TiB", modes=("plain",), allow_batch_dependent=True)
    ours = next(one for one in found.variants if one.parts == 1)
    others = {"Accelerate": _accelerate, "DeepSpeed": _deepspeed, "MemTracker": lambda _: _mem_tracker(make)}
    said: dict[str, int | None] = {"penstock": ours.peak_nbytes, "penstock fits": found.needed_nbytes(ours)}
    for name, estimate in others.items():
        try:
            said[name] = estimate(model)
        except Exception as error:  # noqa: BLE001  of another library
            print(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            said[name] = None
    return said


def _accelerate(model: nn.Module) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    first = next(model.parameters())
    as_float32 = calculate_maximum_sizes(model)[0] * 4 // first.element_size()  # which the command loads
    return int(max(estimate_training_usage(as_float32, str(first.dtype).rpartition(".")[2]).values()))


def _deepspeed(model: nn.Module) -> int:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs, model_to_params

    return int(estimate_zero2_model_states_mem_needs(model_to_params(model), cpu_offload=False)[1])


def _mem_tracker(make: Callable[[], Step]) -> int:
    with FakeTensorMode():
        model, loss_fn, batch, optimizer = make()
        for group in optimizer.param_groups:
            group.update({"fused": True} if "fused" in group else {})
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tree_leaves(tree_map_only(Tensor, lambda one: one, batch)))
        with tracker:
            for number in range(2):
                loss_fn(model, batch)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return int(max(one["Total"] for one in peaks.values()))


def main() -> None:
    """Estimate, count, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=STEPS, help="one of the models")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "plan_peers", "machine": facts(), "models": []}
    for name, make in STEPS.items():
        if asked.only in (None, name):
            torch.manual_seed(0)
            row = {"name": name, "estimates": estimates(make), "counted": counted(make())}
            report["models"].append(row)
            cells = (f"{one} {estimate_text(row['estimates'][one], row['counted'])}" for one in ESTIMATES)
            print(f"{name}: {size_text(row['counted'])} counted; {'; '.join(cells)}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
