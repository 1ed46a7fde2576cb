"""Nothing asks an object of the user's for its `__dict__`, which would slow all its attributes down for good."""

from __future__ import annotations

import ast
import dataclasses
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

import penstock
from penstock import DataLoader
from penstock.core.object_attributes import attributes_of, has_attributes, values_of

ROOT = Path(penstock.__file__).parent

ALLOWED = {
    "cli/import_object.py": ("a module", {"vars(imported)"}),
    "core/object_attributes.py": (
        "what keeps a dict anyway; classes",
        {"object.__getattribute__(thing, '__dict__')", "vars(one)"},
    ),
    "core/plain_tree.py": (
        "a tensor of a batch, whose fast attributes are its class's",
        {"tensor.__dict__", "vars(torch)"},
    ),
    "core/tree.py": ("a batch that is no plain collection, as torch's pin_memory does", {"copy.copy(original)"}),
    "data/formats/arrow/ipc.py": ("a threading.local", {"self._threads.__dict__"}),
    "data/mixture.py": ("shared memory of penstock's", {"self._memory.__reduce__"}),
    "data/sample_cache/sample_bytes.py": ("a module", {"vars(torch)"}),
    "data/sample_cache/sample_cache.py": ("shared memory of penstock's", {"self._memory.__reduce__"}),
    "launch/program.py": ("a module", {"main.__dict__"}),
    "loader/dataloader.py": ("a module", {"vars(torch_module)"}),
    "loader/fallback.py": ("classes", {"vars(_BASE)", "vars(kind)", "vars(one)", "vars(owner)"}),
    "loader/iterator.py": (
        "penstock's iterators; a stream that a rank reads once more to pad its epoch",
        {"vars(new)", "copy.copy(config.dataset)"},
    ),
    "loader/to_device/pinning.py": ("a module", {"vars(torch_module)"}),
    "loader/factory.py": ("an object of a batch", {"copy.deepcopy(leaf)"}),
    "loader/sampling/unknown_order.py": (
        "a state, not what has it",
        {"copy.deepcopy(self._now())", "copy.deepcopy(thing.state_dict())"},
    ),
    "observe/live/torch_watch.py": ("classes", {"kind.__dict__", "one.__dict__"}),
    "loader/transport/codec.py": ("tensors and arrays", {"obj.__reduce__", "obj.__reduce_ex__"}),
    "loader/workers/fetcher.py": ("a state, not what has it", {"copy.deepcopy(self._dataset.state_dict())"}),
    "loader/workers/stream_shard.py": (
        "several shards of a stream in one process, which torch cannot have, need copies of it",
        {"copy.deepcopy(self._worker_spec.dataset)"},
    ),
    "memory/frameworks/hf_trainer.py": (
        "Hugging Face's trainer, whose numbers are put back",
        {"copy.deepcopy(getattr(trainer, '_metrics', None))", "copy.deepcopy(metrics)", "vars(trainer)"},
    ),
    "memory/frameworks/lightning_trainer.py": (
        "metrics of Lightning's, which are modules",
        {"metric.__dict__", "self._results[key].__dict__"},
    ),
    "memory/planning/fake_copy.py": ("torch.nn.Module has a dict", {"copy.deepcopy((model, optimizer, batch))"}),
    "memory/planning/verify_plan.py": ("torch.nn.Module has a dict", {"block.__dict__"}),
    "memory/optimizer/joined_optimizers.py": ("optimizers", {"copy.deepcopy(self.optimizers, memo)"}),
    "memory/recovery/state_tree.py": (
        "what a step has changed is put back into the dicts of a model and an optimizer",
        {"hasattr(value, '__dict__')", "one.__dict__", "tensor.__dict__", "value.__dict__"},
    ),
    "memory/recovery/snapshot.py": (
        "metrics and the like, that the user names",
        {"copy.deepcopy(one.state_dict())", "copy.deepcopy(state)"},
    ),
    "memory/recovery/outside_names.py": (
        "the object whose method the loss is; classes",
        {"getattr(owner, '__dict__', None)", "hasattr(function, '__dict__')", "vars(kind)"},
    ),
    "observe/doctor/contents/origins.py": (
        "a sampler that is not torch's is drawn from a copy, so that its own state stays",
        {"copy.deepcopy(sampler, {id(one): one for one in kept})"},
    ),
    "observe/doctor/probes/constant_seeds.py": ("modules", {"vars(module)"}),
    "observe/doctor/probes/copy_on_write.py": (
        "modules and classes",
        {"vars(kind)", "vars(sys.modules.get(kind.__module__, kind))"},
    ),
}
"""Files that may ask something for its dict: what that is, and the expressions."""

_ASKING_CALLS = {"vars", "dir", "copy.copy", "copy.deepcopy", "inspect.getmembers", "inspect.getattr_static"}
_ASKING_NAMES = {"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"}


def _askings(tree: ast.AST) -> Iterator[str]:
    """Yield what asks something other than `self` for its dict."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _ASKING_CALLS:
            asked = ast.unparse(node.args[0]) if node.args else ""
        elif isinstance(node, ast.Call) and any(
            isinstance(one, ast.Constant) and one.value in _ASKING_NAMES for one in node.args
        ):
            asked = ast.unparse(node.args[0])
        elif isinstance(node, ast.Attribute) and node.attr in _ASKING_NAMES and not isinstance(node.value, ast.Call):
            asked = ast.unparse(node.value)
        else:
            continue
        if asked != "self":
            yield ast.unparse(node)


def test_no_expression_asks_an_object_for_its_dict_but_those_with_a_reason() -> None:
    found = {
        str(path.relative_to(ROOT)): {*_askings(ast.parse(path.read_text(encoding="utf-8")))}
        for path in sorted(ROOT.rglob("*.py"))
    }
    assert {file: texts for file, texts in found.items() if texts} == {
        file: texts for file, (_, texts) in ALLOWED.items()
    }


class Words(Dataset[Any]):
    unit = "m"

    def __init__(self) -> None:
        self.words = ["a", "b", "c", "d"]
        self.settings = {"words": 3}
        self.unit = "km"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    @property
    def broken(self) -> int:
        raise AssertionError("a property was asked")


class Backwards(Sampler[int]):
    def __init__(self) -> None:
        self.indices = [3, 2, 1, 0]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class Stacked:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.tensor(samples)


def has_dict_in_use(thing: Any) -> bool:
    return any(type(one) is dict and "marked_by_the_test" in one for one in gc.get_referents(thing))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="an object's dict and its array live side by side there")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_leaves_the_attributes_of_what_it_is_given_where_they_are(workers: int) -> None:
    parts: tuple[Any, ...] = Words(), Backwards(), Stacked()
    for part in parts:
        part.marked_by_the_test = 1
    dataset, sampler, collate_fn = parts
    loader = DataLoader(dataset, 2, sampler=sampler, collate_fn=collate_fn, num_workers=workers)
    assert [batch.tolist() for batch in loader] == [[3, 2], [1, 0]]
    other = DataLoader(dataset, 2, sampler=sampler, collate_fn=collate_fn, num_workers=workers)
    other.load_state_dict(loader.state_dict())
    assert len(list(other)) == 2
    assert not any(map(has_dict_in_use, parts))
    assert vars(dataset)
    assert has_dict_in_use(dataset)  # this is what the test would have seen


def test_attributes_are_found_with_and_without_a_dict_and_no_code_of_the_class_runs() -> None:
    words = Words()
    expected = {"words": ["a", "b", "c", "d"], "settings": {"words": 3}, "unit": "km"}
    assert attributes_of(words) == expected
    assert [one for one in values_of(words) if one is not Words] == [*expected.values()]
    assert vars(words) == expected
    words.late = 5  # type: ignore[attr-defined]
    assert attributes_of(words) == {**expected, "late": 5}
    assert 5 in values_of(words)


def test_a_value_whose_name_nobody_knows_is_found_without_it() -> None:
    words = Words()
    words.late = "set from outside"  # type: ignore[attr-defined]
    assert "late" not in attributes_of(words)
    assert "set from outside" in values_of(words)


def test_attributes_of_dataclasses_and_slots_are_found() -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        number: int

    @dataclasses.dataclass(slots=True)
    class Slotted:
        number: int

    assert attributes_of(Frozen(3)) == attributes_of(Slotted(3)) == {"number": 3}
    assert (has_attributes(Frozen(3)), has_attributes(Slotted(3)), has_attributes([])) == (True, False, False)
    assert attributes_of([1, 2]) == attributes_of(5) == {}
