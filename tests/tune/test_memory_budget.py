"""The memory that a setting needs is predicted before it is tried."""

from __future__ import annotations

from tuned_machine import MIB, Machine

from penstock.tune.memory_budget import MemoryBudget
from penstock.tune.setting import Setting


def process(workers: int, prefetch: int = 2) -> Setting:
    return Setting(workers=workers, worker_type="process", prefetch_factor=prefetch)


def budget(nbytes: int = 200 * MIB, start_method: str = "fork") -> MemoryBudget:
    return MemoryBudget(nbytes=nbytes, start_method=start_method)


def test_the_first_process_is_predicted_to_need_what_the_training_process_grew_by() -> None:
    known = budget()
    grown = Machine(step_ms=1, work_ms=1, batch_nbytes=10 * MIB).measure(Setting(), at_least_s=1)
    known.learn(grown)
    assert known.needed_nbytes(process(1)) > 10 * MIB * 4 + grown.ram_nbytes


def test_more_workers_need_what_the_first_took_and_their_batches() -> None:
    known, machine = budget(), Machine(step_ms=1, work_ms=1, worker_nbytes=50 * MIB, batch_nbytes=MIB)
    known.learn(machine.measure(Setting(), at_least_s=1))
    known.learn(machine.measure(process(1), at_least_s=1))
    for workers in (2, 3, 4):
        assert machine.ram_nbytes(process(workers)) <= known.needed_nbytes(process(workers))
        assert known.needed_nbytes(process(workers)) <= 1.3 * machine.ram_nbytes(process(workers))
    assert known.allows(process(3))
    assert not known.allows(process(4))


def test_threads_need_their_batches_only_and_prefetch_needs_more_of_them() -> None:
    known, machine = budget(), Machine(step_ms=1, work_ms=1)
    known.learn(machine.measure(Setting(), at_least_s=1))
    thread = Setting(workers=2, worker_type="thread")
    assert known.needed_nbytes(thread) < known.needed_nbytes(process(2))
    assert known.needed_nbytes(process(2, 8)) > known.needed_nbytes(process(2, 2))


def test_a_spawned_worker_needs_its_own_torch() -> None:
    assert budget(start_method="spawn").needed_nbytes(process(1)) > 200 * MIB
