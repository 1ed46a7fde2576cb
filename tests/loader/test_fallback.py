"""A loader that penstock's iterator cannot run has torch's, and refuses what only penstock's can do."""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import threading
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import dataloader as torch_module

from penstock import DataLoader, OptionError, StateError


class _Queue(queue.Queue[Any]):
    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class _Thread(threading.Thread):
    pid = property(id)


class Threads(SpawnContext):
    """Its workers are threads that look like processes."""

    Process = _Thread  # type: ignore[assignment]
    Event = threading.Event  # type: ignore[assignment]

    @staticmethod
    def Queue(*_: object) -> _Queue:  # type: ignore[override]  # noqa: N802
        return _Queue()


def loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(10), 4, num_workers=2, multiprocessing_context=Threads(), **arguments)


def test_workers_that_are_no_processes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)  # torch sets it in this process
    assert sorted(number for batch in loader() for number in batch.tolist()) == list(range(10))


def test_what_torchs_iterator_cannot_do_is_refused_with_the_reason() -> None:
    reason = "Process of its multiprocessing context is _Thread, which is no process"
    with pytest.raises(StateError, match=reason):
        loader().state_dict()
    for arguments, name in (({"errors": "skip"}, "errors"), ({"seed": 3}, "seed")):
        with pytest.raises(OptionError, match=f"{name}= cannot be had with torch.s iterator.*{reason}"):
            iter(loader(**arguments))


def test_a_context_with_processes_of_its_own_is_not_left_to_torch() -> None:
    class Processes(multiprocessing.context.ForkContext):
        class Process(multiprocessing.context.ForkProcess):
            """Still a process."""

    batches = DataLoader(torch.arange(10), 4, num_workers=1, multiprocessing_context=Processes())
    assert type(iter(batches)).__module__ == "penstock.loader.iterator"


def test_accelerate_does_not_silently_put_torchs_loader_in_the_place_of_penstocks(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    one, other = (DataLoader(range(8), 2, shuffle=True, seed=1) for _ in range(2))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="without seed=; leave it out of prepare"):
        accelerator.prepare(one)
    with pytest.warns(UserWarning, match="uses torch's DataLoader; for penstock's, leave it out"):
        plain = accelerator.prepare(DataLoader(range(8), 2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in plain] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    accelerator.register_for_checkpointing(one)
    iterator = iter(one)
    next(iterator)
    accelerator.save_state(str(tmp_path))
    accelerator._custom_objects[:] = [other]
    accelerator.load_state(str(tmp_path))
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Rest:
    """The batches after the first two, as a loader that resumes by itself takes them."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Any:
        return itertools.islice(iter(self.sampler), 2, None)


def overriding(base: Any, name: str, value: Any) -> Any:
    return type("Own", (base,), {name: value})


OVERRIDES: dict[str, Any] = {
    "_index_sampler": property(lambda self: Rest(self.batch_sampler)),
    "_auto_collation": False,
    "batch_sampler": property(lambda self: [[5, 6], [7]], lambda self, value: None),
    "collate_fn": property(lambda self: sorted, lambda self, value: None),
    "drop_last": property(lambda self: True, lambda self, value: None),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", OVERRIDES)
def test_a_subclass_that_overrides_what_torchs_iterator_reads_gets_torchs_batches(name: str, workers: int) -> None:
    arguments = {"sampler": [[0, 1], [2]]} if name == "_auto_collation" else {"batch_size": 3}
    arguments |= {"num_workers": workers, "collate_fn": list}
    want, got = (
        overriding(base, name, OVERRIDES[name])(Rows() if name != "_auto_collation" else Many(), **arguments)
        for base in (TorchDataLoader, DataLoader)
    )
    assert list(got) == list(want)
    assert f"its class Own has a {name} of its own" in got.statistics().fallback_reason
    with pytest.raises(StateError, match=f"Own has a {name}"):
        got.state_dict()


class Many(Rows):
    def __getitem__(self, index: Any) -> Any:
        return [*index]


def test_names_that_an_attribute_of_the_loader_hides_change_nothing() -> None:
    loader = overriding(DataLoader, "num_workers", 5)(Rows(), 4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not loader.statistics().fallback_reason


def test_a_dataset_kind_that_the_program_has_set_is_torchs_to_follow() -> None:
    found = []
    for loader in (TorchDataLoader(Rows(), 4), DataLoader(Rows(), 4)):
        loader._dataset_kind = torch_module._DatasetKind.Iterable
        found.append([batch.tolist() for batch in itertools.islice(loader, 3)])
    assert found[0] == found[1] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "_dataset_kind" in loader.statistics().fallback_reason


class Counted:
    """What a library puts into torch's iterator."""

    def __init__(self, original: Any) -> None:
        self.calls = 0
        self.original = original

    def method(self) -> Any:
        def counted(iterator: Any, *arguments: Any) -> Any:
            self.calls += 1
            return self.original(iterator, *arguments)

        return counted


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["__init__", "__next__", "_reset", "_next_index"])
def test_a_pass_is_torchs_while_a_library_has_replaced_a_method_of_its_iterator(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(Rows(), 4, num_workers=workers)
    assert len(list(loader)) == 2
    assert not loader.statistics().fallback_reason
    with monkeypatch.context() as patched:
        counted = Counted(getattr(torch_module._BaseDataLoaderIter, name))
        patched.setattr(torch_module._BaseDataLoaderIter, name, counted.method())
        assert len(list(loader)) == 2
        assert counted.calls >= (name != "_reset" or workers > 0)
        reason = loader.statistics().fallback_reason
        assert f"{__name__} ({__file__}:" in reason
        assert f"has replaced _BaseDataLoaderIter.{name}" in reason
    assert len(list(loader)) == 2
    assert not loader.statistics().fallback_reason


def test_workers_that_persist_make_room_for_torchs_when_a_method_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 2
    counted = Counted(torch_module._BaseDataLoaderIter.__next__)
    monkeypatch.setattr(torch_module._BaseDataLoaderIter, "__next__", counted.method())
    assert len(list(loader)) == 2
    assert counted.calls == 3


def test_a_method_that_a_class_of_iterators_did_not_have_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(torch_module._BaseDataLoaderIter.__next__)
    monkeypatch.setattr(torch_module._SingleProcessDataLoaderIter, "__next__", counted.method(), raising=False)
    assert len(list(DataLoader(Rows(), 4))) == 2
    assert counted.calls == 3


def test_a_class_that_has_taken_the_place_of_torchs_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch_module._SingleProcessDataLoaderIter):
        pass

    monkeypatch.setattr(torch_module, "_SingleProcessDataLoaderIter", Own)
    loader = DataLoader(Rows(), 4)
    assert type(iter(loader)) is Own
    assert "Own has taken the place of _SingleProcessDataLoaderIter" in loader.statistics().fallback_reason


@pytest.mark.parametrize("workers", [0, 2])
def test_programs_read_what_torchs_iterator_has_and_cannot_set_it(workers: int) -> None:
    kinds = torch_module._SingleProcessDataLoaderIter, torch_module._MultiProcessingDataLoaderIter
    torch.manual_seed(0)
    theirs = iter(TorchDataLoader(Rows(), 2, num_workers=workers))
    torch.manual_seed(0)
    iterator = iter(DataLoader(Rows(), 2, num_workers=workers))
    next(iterator), next(theirs)
    assert [isinstance(iterator, kind) for kind in kinds] == [isinstance(theirs, kind) for kind in kinds]
    for name in ("_num_yielded", "_num_workers", "_base_seed", "_persistent_workers", "_collate_fn", "_profile_name"):
        assert getattr(iterator, name) == getattr(theirs, name)
    assert len(iterator._workers) == workers
    assert [*iterator._index_sampler] == [*theirs._index_sampler]
    for name in ("_num_yielded", "_sampler_iter"):
        with pytest.raises(AttributeError):
            setattr(iterator, name, 3)
    with pytest.raises(AttributeError, match="load_state_dict"):
        _ = iterator._sampler_iter
