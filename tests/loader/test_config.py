"""LoaderConfig and LoaderRuntime: arguments are checked once, follow torch's attributes, and travel with a copy."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import warnings
import weakref
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, OptionError
from penstock.loader.dataloader import config_of, runtime_of


def test_a_config_cannot_be_changed() -> None:
    config = config_of(DataLoader(range(4)))
    with pytest.raises(FrozenInstanceError):
        config.num_workers = 3  # type: ignore[misc]


def test_an_attribute_that_torch_lets_a_program_set_is_used_in_the_next_pass() -> None:
    loader = DataLoader(range(4), 2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    loader.collate_fn = tuple
    assert [*loader] == [(0, 1), (2, 3)]
    before = config_of(loader)
    assert [*loader] == [(0, 1), (2, 3)]
    assert config_of(loader) is before  # nothing was set
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert [*loader] == [(0, 1), (2, 3)]
    assert (before.num_workers, config_of(loader).num_workers) == (0, 1)
    assert loader.statistics().worker_type == "process"
    object.__setattr__(loader, "batch_sampler", [[3], [0]])  # past torch's refusal
    assert [*loader] == [(3,), (0,)]


def test_a_state_that_is_taken_before_the_next_pass_knows_what_was_set() -> None:
    loader = DataLoader(range(4), 2)
    list(loader)
    loader.num_workers, loader.prefetch_factor = 1, 2
    loader.state_dict()
    assert config_of(loader).num_workers == 1


@pytest.mark.parametrize("name", ["batch_size", "sampler", "dataset", "drop_last"])
def test_an_attribute_that_torch_does_not_let_a_program_set_stays(name: str) -> None:
    loader = DataLoader(range(4), 2)
    before = config_of(loader)
    with pytest.raises(ValueError, match=name):
        setattr(loader, name, None)
    assert config_of(loader) is before


@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_a_runtime_of_its_own_and_the_same_arguments(copied: Any) -> None:
    loader = DataLoader(torch.arange(6), 2, seed=3, errors="skip")
    next(iter(loader))
    other = copied(loader)
    assert config_of(other).seed == 3
    assert config_of(other).errors == "skip"
    assert other.statistics().batches == 0
    assert runtime_of(other) is not runtime_of(loader)
    assert len([*other]) == 3
    assert loader.statistics().batches == 1


def test_a_subclass_may_have_attributes_with_any_names() -> None:
    class Configured(DataLoader[Any]):
        def __init__(self, config: dict[str, int]) -> None:
            self.config, self.runtime, self.rank, self.seed = config, "mine", 7, 8
            super().__init__(range(config["samples"]), 2)
            self.config["after"] = 1

    loader = Configured({"samples": 4})
    assert len([*loader]) == 2
    assert (loader.config, loader.runtime, loader.rank, loader.seed) == ({"samples": 4, "after": 1}, "mine", 7, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"worker_type": "fiber"}, "'process', 'thread', 'ray'"),
        ({"seed": "a"}, "whole number"),
        ({"seed": -1}, "seed must be at least 0, not -1"),
        ({"ring_bytes": 100}, "at least 4096"),
        ({"ring_bytes": "a lot"}, "ring_bytes: 'a lot' is not a size .* as in '24GiB'"),
        ({"device_bytes": -1}, "device_bytes: -1 is not a size"),
        ({"device_bytes": 1.5}, "device_bytes: 1.5 is not a size"),
        ({"snapshot_every_n_steps": "x"}, "snapshot_every_n_steps must be a whole number, not 'x'"),
        ({"pin_memory": "yes"}, "pin_memory must be True, False or .* not 'yes'"),
        ({"max_worker_crashes": None}, "max_worker_crashes must be a whole number"),
        ({"uneven": "cut"}, "'pad', 'drop' or 'join'"),
        ({"device": 1}, "device=1 is not a device: give a name as in 'cuda:1'"),
        ({"device": object}, "is not a device"),
        ({"device_bytes": True}, "device_bytes: True is not a size"),
        ({"seed": True}, "seed must be a whole number, not True"),
        ({"seed": 1 << 80}, "seed must be at most 9223372036854775807, not 1208925819614629174706176"),
        ({"errors": ValueError}, "errors must be 'raise', 'skip' or a callable .* not <class 'ValueError'>"),
        ({"worker_type": "ray://"}, "'ray://host:port', not 'ray://'"),
        ({"sampler": [0], "distributed": True}, "leave them out"),
    ],
)
def test_an_argument_is_refused_before_anything_is_started(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DataLoader(range(4), **arguments)


@pytest.mark.parametrize("workers", ["Auto", None, 2.0])
def test_a_number_of_workers_that_is_none_is_torchs_type_of_error(workers: Any) -> None:
    with pytest.raises(TypeError):
        list(TorchDataLoader(range(4), num_workers=workers))
    with pytest.raises(TypeError, match=f"num_workers must be a number, 'auto', or .* not {workers!r}"):
        DataLoader(range(4), num_workers=workers)
    assert len(list(DataLoader(range(4), num_workers=0.0))) == len(list(TorchDataLoader(range(4), num_workers=0.0)))  # type: ignore[arg-type]


def warned_from(make: Any) -> list[tuple[str, str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in make():
            pass
    return sorted({(str(one.message)[:40], one.filename, one.category.__name__) for one in caught})


class Longer(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter(range(3))


def counted(kind: Any, **options: Any) -> Any:
    loader = kind(Longer(), None, **options)
    assert len(loader) == 2
    return loader


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda kind: kind(range(4), 2, num_workers=40),
        lambda kind: kind(range(4), 2, pin_memory=True),
        counted,
        lambda kind: counted(kind, num_workers=1, persistent_workers=True),
    ],
    ids=["many workers", "no accelerator", "a length that is too small", "and persistent workers"],
)
def test_warnings_that_are_torchs_come_from_where_torchs_come(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: 39)
    theirs, ours = (warned_from(lambda kind=kind: make(kind)) for kind in (TorchDataLoader, DataLoader))  # type: ignore[misc]
    assert ours == theirs
    assert ours


class Named(torch.utils.data.Dataset[str]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        return multiprocessing.current_process().name.partition("-")[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("context", [None, "fork"])
def test_worker_processes_are_named_as_torchs(context: str | None) -> None:
    theirs, ours = (
        list(kind(Named(), num_workers=1, multiprocessing_context=context)) for kind in (TorchDataLoader, DataLoader)
    )
    assert ours == theirs


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_batch_of_indices_raises_torchs_error(workers: int) -> None:
    for kind in (TorchDataLoader, DataLoader):
        with pytest.raises(TypeError, match="'int' object is not iterable"):
            list(kind(range(4), batch_sampler=[5], num_workers=workers))  # type: ignore[list-item]


def test_a_timeout_that_is_no_number_is_none() -> None:
    assert len(list(DataLoader(range(4), num_workers=1, timeout=float("nan")))) == 4


def test_sizes_may_be_text() -> None:
    config = config_of(DataLoader(range(4), ring_bytes="2GiB", device_bytes="1.5 MB"))
    assert (config.ring_bytes, config.device_bytes) == (2 << 30, 1_500_000)


@pytest.mark.parametrize(("given", "means"), [(1, True), (0, False), (None, False)])
def test_pin_memory_may_be_what_torch_takes_for_true_and_false(given: Any, means: Any) -> None:
    assert config_of(DataLoader(range(4), pin_memory=given)).pin_memory == means


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_is_collected_though_its_scheduler_keeps_the_exception_that_it_raised(workers: int) -> None:
    iterator = iter(DataLoader([1, "two"], 2, collate_fn=sum, num_workers=workers))
    try:
        next(iterator)
    except TypeError as error:
        iterator.pipeline.scheduler.kept = error
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None
