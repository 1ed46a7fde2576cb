"""The search finds the fastest setting, the cheapest of equals, keeps the budget, and reports uncertainty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader, TensorDataset
from tuned_machine import MIB, Machine

from penstock import OptionError
from penstock.tune import search
from penstock.tune.search_result import TuneResult
from penstock.tune.setting import Setting
from penstock.tune.trial_bench import TrialBench
from penstock.tune.trial_result import SettingTrial
from penstock.tune.tuned_loop import TunedLoop

GRID = [
    Setting(),
    *(
        Setting(workers=workers, worker_type=worker_type, prefetch_factor=prefetch)
        for worker_type in ("process", "thread")
        for workers in range(1, 6)
        for prefetch in (1, 2, 4, 8)
    ),
]


def found_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, **limits: int) -> TuneResult:
    monkeypatch.setattr(search, "TrialBench", lambda loop, most, one_at_a_time: machine)
    loader = DataLoader(TensorDataset(torch.zeros(8)))
    return search.tune(TunedLoop(loader=loader), cpus=limits.pop("cpus", 4), **limits)


MACHINES = {
    "decode-bound": Machine(step_ms=10, work_ms=90),
    "decode-bound, GIL released": Machine(step_ms=10, work_ms=90, gil=False),
    "three are enough": Machine(step_ms=20, work_ms=55),
    "transport-bound": Machine(step_ms=0.01, work_ms=1.5, handling_ms=0.5),
    "tiny": Machine(step_ms=0.0, work_ms=0.05, handling_ms=0.2),
    "slow samples": Machine(step_ms=10, work_ms=25, jitter=0.5),
    "compute-bound": Machine(step_ms=200, work_ms=3),
    "compute-bound, but worth one": Machine(step_ms=100, work_ms=30),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_it_is_within_5_percent_of_the_grids_best_with_few_trials(name, noise, monkeypatch) -> None:
    given = MACHINES[name]
    machine = Machine(**{**{k: getattr(given, k) for k in given.__dataclass_fields__}, "noise": noise, "tried": []})
    found = found_on(machine, monkeypatch)
    best = min(machine.period_ms(setting) for setting in GRID if setting.workers <= 4)
    assert machine.period_ms(found.choice) <= best / 0.95
    assert len(machine.tried) <= 26


def test_of_settings_that_hide_behind_the_step_the_one_with_fewest_workers_wins(monkeypatch) -> None:
    assert found_on(Machine(step_ms=20, work_ms=55), monkeypatch).choice == Setting(workers=3, worker_type="process")
    assert found_on(Machine(step_ms=100, work_ms=30), monkeypatch).choice == Setting(workers=1, worker_type="process")


def test_a_loop_that_hardly_loads_needs_no_worker_and_no_second_trial(monkeypatch) -> None:
    machine = Machine(step_ms=200, work_ms=3)
    found = found_on(machine, monkeypatch)
    assert found.choice == Setting()
    assert machine.tried == [Setting()]
    assert "nothing to gain" in found.why


def test_workers_that_sleep_may_be_more_than_the_cores(monkeypatch) -> None:
    found = found_on(Machine(step_ms=5, work_ms=50, busy=0.05), monkeypatch)
    assert found.choice.workers in (9, 10)
    least = found_on(Machine(step_ms=5, work_ms=50, busy=0.5), monkeypatch)
    assert least.choice.workers == 8
    assert "8 workers is the most that may run" in least.why
    assert found_on(Machine(step_ms=5, work_ms=50), monkeypatch).choice.workers <= 4


@pytest.mark.parametrize("busy", [0.5, 0.2, 0.05, 0.01])
@pytest.mark.parametrize("gil", [True, False])
def test_workers_that_wait_are_within_a_tenth_of_a_wide_grids_best_with_few_trials(gil, busy, monkeypatch) -> None:
    machine = Machine(step_ms=0.01, work_ms=80, busy=busy, cores=2, gil=gil, noise=0.01)
    found = found_on(machine, monkeypatch, cpus=2)
    wide = [
        Setting(workers=workers, worker_type=worker_type)
        for worker_type in ("process", "thread")
        for workers in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    ]
    assert machine.period_ms(found.choice) <= min(map(machine.period_ms, wide)) / 0.9
    assert len(machine.tried) <= 30


def test_prefetch_is_raised_only_where_the_step_still_waits(monkeypatch) -> None:
    assert found_on(Machine(step_ms=10, work_ms=25, jitter=0.5), monkeypatch).choice.prefetch_factor > 2
    steady = Machine(step_ms=10, work_ms=25)
    found_on(steady, monkeypatch)
    assert {setting.prefetch_factor for setting in steady.tried} == {2}


def test_threads_are_chosen_where_memory_is_short_and_the_gil_is_released(monkeypatch) -> None:
    machine = Machine(step_ms=10, work_ms=35, gil=False, worker_nbytes=500 * MIB)
    found = found_on(machine, monkeypatch, ram_nbytes=64 * MIB)
    assert found.choice.worker_type == "thread"
    assert "two threads make 2.0 times" in found.gil


class BusyMoment(Machine):
    """Is busy with something else while two threads are tried."""

    def measure(self, setting: Setting, **limits: float) -> SettingTrial:
        trial = super().measure(setting, **limits)
        is_slow = setting == Setting(workers=2, worker_type="thread")
        return replace(trial, work_s=2 * trial.work_s) if is_slow else trial


def test_threads_are_tried_where_samples_wait_however_slow_two_look(monkeypatch) -> None:
    machine = BusyMoment(step_ms=0.1, work_ms=80, busy=0.01, cores=2, gil=False)
    assert found_on(machine, monkeypatch, cpus=2).choice.worker_type == "thread"


@pytest.mark.parametrize("ram_mib", [30, 60, 90, 130])
def test_no_trial_goes_over_the_budget(ram_mib, monkeypatch) -> None:
    machine = Machine(step_ms=5, work_ms=200, worker_nbytes=24 * MIB, batch_nbytes=MIB)
    found = found_on(machine, monkeypatch, ram_nbytes=ram_mib * MIB)
    assert all(machine.ram_nbytes(setting) <= ram_mib * MIB for setting in machine.tried if setting.workers)
    assert machine.ram_nbytes(found.choice) <= ram_mib * MIB


def test_a_setting_that_is_measured_over_the_budget_is_dropped_and_reported(monkeypatch) -> None:
    machine = Machine(step_ms=5, work_ms=200, worker_nbytes=100 * MIB)  # far more than a bare worker is thought to take
    found = found_on(machine, monkeypatch, ram_nbytes=60 * MIB)
    assert machine.tried.count(Setting(workers=1, worker_type="process")) == 1
    assert found.choice.worker_type != "process"
    assert found.left_out[0][1] > 60 * MIB
    assert "takes 10" in found.render()


def test_a_budget_that_holds_no_batches_is_an_error_that_says_what_to_change(monkeypatch) -> None:
    with pytest.raises(OptionError, match="raise --ram or lower batch_size"):
        found_on(Machine(step_ms=5, work_ms=200, batch_nbytes=50 * MIB), monkeypatch, ram_nbytes=20 * MIB)


def test_there_are_never_more_workers_than_cpus(monkeypatch) -> None:
    machine = Machine(step_ms=1, work_ms=300, gil=False, cores=64)
    found_on(machine, monkeypatch, cpus=3)
    assert max(setting.workers for setting in machine.tried) == 3
    with pytest.raises(OptionError, match="at least one CPU"):
        found_on(machine, monkeypatch, cpus=0)


def test_an_uncertain_choice_is_reported_as_such(monkeypatch) -> None:
    found = found_on(Machine(step_ms=10, work_ms=90, noise=0.2), monkeypatch)
    assert "known to 40% only" in found.doubt
    assert "Not sure" in found.render()
    assert not found_on(Machine(step_ms=10, work_ms=90), monkeypatch).doubt


def test_the_result_is_lines_with_the_choice_marked_and_a_line_to_paste(monkeypatch) -> None:
    found = found_on(Machine(step_ms=20, work_ms=55), monkeypatch)
    text = found.render()
    assert "\n> 3 processes, prefetch 2" in text
    assert text.endswith("\npenstock.DataLoader(..., num_workers=3)\n")
    assert "Stopped after" in text
    assert found.to_json()["line"] == "penstock.DataLoader(..., num_workers=3)"


class ScriptedBench(TrialBench):
    """Runs the real loop and its workers, a batch or two for each trial; the figures are those of a machine."""

    machine: Machine

    def measure(
        self, setting: Setting, *, at_least_s: float, at_least: int = 16, at_most_s: float = 2.0
    ) -> SettingTrial:
        real = super().measure(setting, at_least_s=0.0, at_least=1, at_most_s=0.0)
        assert real.batches >= 1
        return self.machine.measure(setting, at_least_s=at_least_s)


def test_a_real_loop_that_waits_gets_workers_and_one_that_does_not_gets_none(monkeypatch) -> None:
    monkeypatch.setattr(search, "TrialBench", ScriptedBench)
    loop = TunedLoop(loader=DataLoader(Numbered(4000), batch_size=8))
    ScriptedBench.machine = Machine(step_ms=20, work_ms=32, busy=0.1)
    found = search.tune(loop, cpus=4)
    assert found.choice == Setting(workers=2, worker_type="process")
    ScriptedBench.machine = Machine(step_ms=20, work_ms=0.1)
    assert search.tune(loop, cpus=4).choice == Setting()
