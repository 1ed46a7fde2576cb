"""A loader that penstock's iterator cannot run has torch's, and refuses what only penstock's can do."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch

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
