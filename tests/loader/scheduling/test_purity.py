"""A dataset is pure only if nothing of the program's own runs in a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

import penstock
from penstock import PadCollate
from penstock.loader.scheduling.purity import why_impure
from penstock.loader.workers.worker_spec import ErrorPolicy, WorkerSpec


def doubt(
    dataset: Any,
    collate_fn: Callable[[Any], Any] = default_collate,
    errors: ErrorPolicy = "raise",
    init_fn: Callable[[int], Any] | None = None,
) -> str:
    spec = WorkerSpec(
        dataset=dataset,
        collate_fn=collate_fn,
        iterable=False,
        auto_collation=True,
        drop_last=False,
        init_fn=init_fn,
        errors=errors,
    )
    return why_impure(spec)


TENSORS = TensorDataset(torch.arange(6), torch.rand(6, 2))


class MyTensors(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return torch.rand(2)


class MyList(list[int]):
    pass


class MyTensor(torch.Tensor):
    pass


class MyPad(PadCollate):
    pass


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        Subset(TENSORS, [1, 2]),
        Subset(TENSORS, np.arange(3)),
        Subset(TENSORS, range(3)),
        ConcatDataset([TENSORS, Subset(TENSORS, [0])]),
        ConcatDataset(random_split(TENSORS, [2, 4])),
        StackDataset(TENSORS, torch.arange(6)),
        StackDataset(x=TENSORS),
        range(5),
        torch.rand(3),
        np.zeros((3, 2)),
        [1, 2.0, True, None, "a", b"b", 1j, np.float32(3), torch.zeros(2), np.zeros(2)],
        ({"x": [1, (2, "a")], "y": {"z": torch.zeros(1)}},),
        [],
    ],
)
def test_torchs_datasets_and_plain_data_are_pure(dataset: Any) -> None:
    assert doubt(dataset) == ""
    assert doubt(dataset, default_convert) == ""
    assert doubt(dataset, PadCollate({"x": 0}), "skip") == ""


@pytest.mark.parametrize(
    ("dataset", "impure"),
    [
        (Numbered(3), "Numbered"),
        (MyTensors(torch.arange(3)), "MyTensors"),
        (TensorDataset(torch.zeros(2).as_subclass(MyTensor)), "MyTensor"),
        (Subset(Numbered(3), [1]), "Numbered"),
        (Subset(TENSORS, MyList([1])), "MyList"),
        (ConcatDataset([TENSORS, Numbered(3)]), "Numbered"),
        (StackDataset(x=TENSORS, y=Numbered(6)), "Numbered"),
        ([1, Numbered(3)], "list"),
        ([{"x": MyList([1])}], "list"),
        (np.array([abs]), "ndarray"),
        (ENDLESS, "list"),
    ],
)
def test_whatever_may_have_code_of_the_programs_is_not(dataset: Any, impure: str) -> None:
    assert doubt(dataset) == f"{impure} may keep a state"


def test_nor_is_what_else_of_the_programs_runs_in_a_worker() -> None:
    assert "collate_fn" in doubt(TENSORS, lambda samples: samples)
    assert "collate_fn" in doubt(TENSORS, MyPad({"x": 0}))
    assert "errors=" in doubt(TENSORS, errors=lambda error, index: 0)
    assert "worker_init_fn" in doubt(TENSORS, init_fn=abs)


def test_nor_is_default_collate_with_functions_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map=None: batch)
    assert "collate_fn" in doubt(TENSORS)


def test_sources_of_ours_are_pure_and_their_functions_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": 2}\n' * 4)
    source = penstock.open(tmp_path / "a.jsonl", index=True)
    assert isinstance(source, penstock.Source)
    assert doubt(source) == ""
    assert doubt(source.select([1, 2]).select_fields(["x"])) == ""
    assert doubt(source.filter(lambda sample: True)) == ""  # it has been called already
    assert doubt(source.map(lambda sample: sample).select([0])) == "function may keep a state"

    class Own(penstock.Source):
        pass

    assert "Own may keep a state" in doubt(Own().map(abs))
    source.close()
