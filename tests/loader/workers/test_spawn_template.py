"""Workers that are forked from the template see what spawned ones see; the template comes, changes and goes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import spawn_facts
import torch

from penstock import DataLoader
from penstock.loader.workers.spawn import spawn_template
from penstock.loader.workers.spawn.spawn_template import SpawnProcess, can_fork_spawned, inherited_state, warm_up

SPAWN = multiprocessing.get_context("spawn")

pytestmark = pytest.mark.skipif(not can_fork_spawned(SPAWN), reason="only Linux has templates")


@pytest.fixture(autouse=True)
def _no_template_is_left() -> Iterator[None]:
    yield
    spawn_template.leave()
    while not spawn_template.reap():
        time.sleep(0.01)


def facts_of(process_class: type[BaseProcess], bye: Path) -> list[Any]:
    receive, send = SPAWN.Pipe(duplex=False)
    process = process_class(target=spawn_facts.tell, args=(send, str(bye)), name="asked", daemon=True)
    process.start()
    send.close()
    facts, *others = [receive.recv() for _ in range(3)]
    process.join()
    receive.close()
    assert (process.exitcode, process.is_alive()) == (3, False)
    assert bye.exists()  # exit handlers have run
    return [facts, *others]


@pytest.mark.slow
def test_a_worker_from_the_template_sees_what_a_spawned_one_sees(tmp_path, monkeypatch) -> None:
    spawned, number, had_torch = facts_of(SPAWN.Process, tmp_path / "spawned")
    forked, one, is_warm = facts_of(SpawnProcess, tmp_path / "forked")
    assert forked.pop("descriptors") <= spawned.pop("descriptors")
    assert forked == spawned
    assert (had_torch, is_warm) == (False, True)
    (template,) = spawn_template.templates
    _, another, _ = facts_of(SpawnProcess, tmp_path / "second")
    assert spawn_template.templates == [template]
    assert len({number, one, another}) == 3

    monkeypatch.setenv("WRITTEN_BETWEEN_TWO_EPOCHS", "now")
    assert facts_of(SpawnProcess, tmp_path / "third")[0]["environment"]["WRITTEN_BETWEEN_TWO_EPOCHS"] == "now"
    assert spawn_template.templates != [template]


def test_everything_that_a_new_process_inherits_makes_another_template(monkeypatch, tmp_path) -> None:
    before = inherited_state()
    assert inherited_state() == before
    monkeypatch.setenv("ANOTHER", "1")
    assert inherited_state() != before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert inherited_state() != before
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert inherited_state() != before
    monkeypatch.undo()
    mask = os.umask(0o077)
    try:
        assert inherited_state()[:2] == before[:2]
        assert mask == 0o077 or inherited_state() != before
    finally:
        os.umask(mask)
    assert inherited_state() == before


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


class Collector(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([gc.isenabled(), "torch" in sys.modules and gc.get_freeze_count() > 100_000])


@pytest.mark.slow
def test_a_workers_garbage_collector_runs_and_leaves_what_the_template_has_imported_alone() -> None:
    (batch,) = DataLoader(Collector(), num_workers=1, multiprocessing_context="spawn")
    assert batch.tolist() == [[True, True]]


@pytest.mark.slow
def test_the_template_is_started_with_the_loader_and_serves_all_its_epochs() -> None:
    loader = DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    (template,) = spawn_template.templates
    epochs = [[batch[:, 0].tolist() for batch in loader] for _ in range(2)]
    assert epochs == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    assert spawn_template.templates == [template]
    assert loader.statistics().start_method == "spawn"


def test_without_worker_processes_of_python_s_own_spawn_there_is_no_template() -> None:
    DataLoader(Rows(), multiprocessing_context=None)
    DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")
    DataLoader(Rows(), num_workers=1, worker_type="thread")

    class OwnContext(type(SPAWN)):  # type: ignore[misc]
        pass

    warm_up(OwnContext())
    assert not spawn_template.templates


@pytest.mark.slow
def test_a_template_that_has_died_is_replaced_by_plain_spawn(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(spawn_template, "failures", [])
    warm_up(SPAWN)
    (template,) = spawn_template.templates
    os.kill(template.pid, 9)
    facts, _, is_warm = facts_of(SpawnProcess, tmp_path / "spawned")
    assert (facts["class"], is_warm) == ("multiprocessing.context.SpawnProcess", False)
    assert not spawn_template.templates


@pytest.mark.slow
def test_a_worker_that_needs_more_descriptors_than_a_message_carries_is_spawned(monkeypatch) -> None:
    sent: list[int] = []
    fork = spawn_template.Template.fork

    def watched_fork(template: spawn_template.Template, fds: list[int]) -> int:
        pid = fork(template, fds)
        sent.append(len(fds))
        return pid

    monkeypatch.setattr(spawn_template.Template, "fork", watched_fork)
    rows = [torch.full((3,), float(number)) for number in range(4)]

    def load(few: list[torch.Tensor]) -> None:
        (batch,) = DataLoader(few, batch_size=4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(batch, torch.stack(few))

    load(rows[:1])
    monkeypatch.setattr(spawn_template, "MOST_FDS", sent[0] + 2)  # each tensor takes one
    load(rows)
    assert not spawn_template.failures
    load(rows[:3])
    assert sent == [sent[0], sent[0] + 2]


def test_the_template_ends_when_the_training_process_is_killed() -> None:
    warm_up(SPAWN)
    (inherited,) = spawn_template.templates
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        warm_up(SPAWN)
        os.write(send, b"%d" % spawn_template.templates[0].pid)
        signal.pause()
    pid = int(os.read(receive, 20))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(receive)
    os.close(send)
    assert pid != inherited.pid
    deadline = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert _runs(inherited.pid)


def _runs(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_where_main_is_imported_again_no_process_is_started_as_multiprocessing_demands(monkeypatch) -> None:
    # A script without `if __name__ == "__main__"` makes its loader in each worker, too.
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    loader = DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(RuntimeError, match="An attempt has been made to start a new process"):
        iter(loader)
    assert not spawn_template.templates
