"""The doctor on difficult loops, its probes, and the command."""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examined import examine_until
from sample_sets import Numbered, Raising, Stream
from torch.multiprocessing.reductions import rebuild_storage_fd
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import penstock
from penstock import cli
from penstock.core.errors import OptionError, PenstockError
from penstock.loader.dataloader import config_of
from penstock.observe.doctor import thresholds
from penstock.observe.doctor.causes import Diagnosis, diagnose, processors
from penstock.observe.doctor.examine import examine
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probes import proc
from penstock.observe.doctor.probes.batch_values import batches_equal
from penstock.observe.doctor.probes.copy_on_write import find_object_heavy_attribute, measure_copy_on_write
from penstock.observe.doctor.probes.image_decode import ImageDecodeRecorder
from penstock.observe.doctor.probes.machine_limits import MachineLimits
from penstock.observe.doctor.probes.steps.step_calls import StepCallRecorder
from penstock.observe.doctor.probes.time_limit import time_limit
from penstock.observe.doctor.rendering import as_json, render
from penstock.observe.doctor.trial import AS_IS, FREE
from penstock.observe.doctor.trials import loop_session, trial_scheduler
from penstock.observe.doctor.trials.batch_source import RepeatedBatchSource, ThreadSource
from penstock.observe.doctor.trials.loader_variant import build_variant
from penstock.observe.record.finding import Finding

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop before any optimizer is what the program is about after a moment."""
    monkeypatch.setattr(trial_scheduler, "_NO_GRADIENT_LOOP_S", 0.1)


class Named(Numbered):
    """Samples are dictionaries."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((8,), float(index)), "labels": index, "name": f"sample {index}"}


class Sleepy(Numbered):
    """A sample takes an hour."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(3600)


class Locked(Numbered):
    """Makes samples under a lock that all workers share."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            return sum(range(20_000))


def test_a_step_may_take_its_batch_apart() -> None:
    source = RepeatedBatchSource(FREE)
    source.batch = {"x": torch.ones(2), "labels": [1, 2]}
    source.next_batch().pop("labels")
    source.next_batch()["labels"].clear()
    assert source.next_batch()["labels"] == [1, 2]


def test_a_sample_that_raises_is_reported_and_what_came_before_it_is_kept() -> None:
    def is_whole(found: Measurements) -> bool:
        return found.samples is not None and found.samples.samples == 3

    found = examine_until(is_whole, DataLoader(Raising(64), batch_size=2), seconds=1.0)
    assert "sample 3 is corrupt" in found.error
    assert diagnose(found).verdict.name == "fails"
    assert found.samples is not None
    assert found.samples.samples == 3


def test_a_step_that_raises_is_reported() -> None:
    def step(batch: Any) -> None:
        raise ValueError("no such layer")

    found = examine((DataLoader(Numbered(64), batch_size=2), step), seconds=1.0)
    assert found.error.startswith("ValueError: no such layer")


def test_samples_that_never_come_do_not_block_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_session, "_FIRST_BATCH_S", 3.0)
    began = time.monotonic()
    found = examine(DataLoader(Sleepy(64), batch_size=2), seconds=0.5)
    assert diagnose(found).verdict.name == "unknown"
    assert time.monotonic() - began < 60
    assert any("first batches took longer" in note and "--pid" in note for note in found.notes)


def test_workers_that_share_a_lock_are_resumed_if_one_was_paused_while_it_held_it() -> None:
    def is_through(found: Measurements) -> bool:
        return found.gain_of(FREE) is not None and not any("took longer than" in note for note in found.notes)

    loop = (DataLoader(Locked(4096), batch_size=8, num_workers=2), lambda batch: None)
    found = examine_until(is_through, loop, seconds=3.0)
    assert is_through(found), found.notes


@pytest.mark.parametrize("workers", [0, 1])
def test_three_samples_are_enough(workers: int) -> None:
    def is_whole(found: Measurements) -> bool:
        return found.as_is is not None and found.samples is not None

    loader = DataLoader(Numbered(3), batch_size=2, num_workers=workers)
    assert is_whole(examine_until(is_whole, loader, seconds=1.0))


def test_a_dataset_without_a_batch_is_reported_as_such() -> None:
    found = examine(DataLoader(Stream(0), batch_size=4), seconds=0.5)
    assert "no batch" in found.error


def test_batches_of_a_batch_sampler_and_of_the_dataset_itself_are_examined() -> None:
    sampler = BatchSampler(SequentialSampler(range(64)), 4, drop_last=False)
    assert examine(DataLoader(Numbered(64), batch_sampler=sampler), seconds=0.6).samples.batch_samples == 4  # type: ignore[union-attr]
    assert examine(DataLoader(Numbered(64), batch_size=None), seconds=0.6).samples.batch_samples == 1  # type: ignore[union-attr]


def test_a_training_function_is_ended_after_the_trials_and_its_validation_is_not_examined() -> None:
    steps = []

    def train() -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        for _ in range(10_000):
            with torch.no_grad():
                for _ in DataLoader(Numbered(2), batch_size=1):
                    pass
            for batch in DataLoader(Named(64), batch_size=2):
                steps[:] = [batch["x"].sum()]
                optimizer.step()
        raise AssertionError("the loop was not ended")

    found = examine(train, seconds=1.0)
    assert (found.settings.dataset, found.error) == ("Named", "")
    assert found.as_is is not None
    assert steps


@pytest.mark.parametrize("cycles", [True, False])
def test_a_loop_over_itertools_cycle_repeats_its_first_epoch(cycles: bool) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    loader = DataLoader(Numbered(8), batch_size=4, shuffle=True)

    def train() -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        for _ in itertools.cycle(loader) if cycles else endless():
            optimizer.step()

    found = examine(train, seconds=0.6)
    assert ("cycled" in [one.name for one in diagnose(found).findings]) == cycles


def test_a_program_that_trains_without_a_loader_is_told_what_shows_its_lines() -> None:
    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

    with pytest.raises(PenstockError, match=r"without a DataLoader .*--pid"):
        examine(train, seconds=0.2)


def test_a_loader_that_is_made_for_every_batch_is_found() -> None:
    dataset = Numbered(64)

    def train() -> None:
        while True:
            next(iter(DataLoader(dataset, batch_size=4, shuffle=True)))

    found = examine_until(lambda found: found.loaders_created > thresholds.FEW_ITERATORS, train, seconds=0.6)
    finding = next(one for one in diagnose(found).findings if one.name == "iterator-recreated")
    assert f"{found.loaders_created} loaders for {found.batches_requested} batches" in finding.evidence
    assert "make the loader once" in finding.remedy


def test_a_second_loader_of_which_each_step_takes_a_batch_is_part_of_the_examined_loop() -> None:
    drawn: list[int] = []

    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        others = iter(DataLoader(Numbered(1_000_000), batch_size=1))
        while True:
            for _ in DataLoader(Numbered(64), batch_size=2):
                drawn.append(int(next(others)[1]))
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()

    found = examine(train, seconds=1.0)
    assert found.as_is is not None
    assert found.as_is.windows, found.notes
    assert drawn[:10] == list(range(10))


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_validation_in_the_middle_of_an_epoch_is_cut_short_when_it_has_taken_its_time(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_scheduler, "_OTHER_LOOPS_S", patience_s)
    seen: list[int] = []

    def train() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        held_out = DataLoader(Numbered(40), batch_size=2)
        while True:
            for step, _ in enumerate(DataLoader(Numbered(64), batch_size=2)):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if step % 5 == 4:
                    with torch.no_grad():
                        seen.append(sum(1 for _ in held_out))

    found = examine(train, seconds=1.0)
    assert (found.error, set(seen)) == ("", {20 if patience_s else 2})


def test_what_a_step_takes_by_next_has_no_end_while_its_loop_is_examined_and_several_are_no_loop() -> None:
    taken: list[int] = []

    def train() -> None:
        taken.clear()
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        for _ in range(1000):
            others = iter(DataLoader(Numbered(64), batch_size=2))
            for _ in DataLoader(Numbered(32), batch_size=2):
                taken.append(len([next(others) for _ in range(2)]))
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()

    found = examine_until(lambda _: len(taken) > 16, train, seconds=1.0)
    assert found.error == ""
    assert len(taken) > 16, "more steps than the others' batches would be enough for"
    assert found.as_is is not None
    assert found.as_is.windows


def test_a_loop_without_gradients_is_examined_if_there_is_no_other() -> None:
    @torch.no_grad()
    def predict() -> None:
        for _ in DataLoader(Named(64), batch_size=2):
            pass

    assert examine(predict, seconds=0.6).settings.dataset == "Named"


def test_loaders_iterate_as_before_after_the_doctor() -> None:
    before = DataLoader.__iter__
    examine((DataLoader(Numbered(16), batch_size=4), lambda batch: None), seconds=0.5)
    assert DataLoader.__iter__ is before
    assert [batch[1].tolist() for batch in DataLoader(Numbered(4), batch_size=2)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("loop", [3, Numbered, lambda: 3, lambda: (1, 2), lambda: None])
def test_an_object_that_is_no_loop_is_rejected_with_what_to_name_instead(loop: Any) -> None:
    with pytest.raises(OptionError, match="DataLoader"):
        examine(loop, seconds=0.5)


def test_a_function_that_fails_before_its_loop_is_rejected_with_its_exception() -> None:
    def train() -> None:
        raise FileNotFoundError("no data here")

    with pytest.raises(PenstockError, match="no data here"):
        examine(train, seconds=0.5)


def test_json_and_text_hold_the_same_verdict() -> None:
    found = examine((DataLoader(Numbered(64), batch_size=4), lambda batch: None), seconds=0.6)
    diagnosis = diagnose(found)
    data = json.loads(json.dumps(as_json(found, diagnosis), default=repr))
    assert data["schema"] == "penstock.doctor/1"
    assert data["verdict"]["name"] in render(found, diagnosis).lower()
    assert next(trial["name"] for trial in data["trials"]) == FREE


def test_a_variant_of_a_loader_keeps_penstocks_own_arguments() -> None:
    own = penstock.DataLoader(
        Numbered(8), batch_size=2, num_workers=2, worker_type="thread", errors="skip", ring_bytes=1 << 20
    )
    made = build_variant(own, num_workers=3)
    build_variant(own, num_workers=300).check_worker_number_rationality()  # warns of nothing: it is the doctor's
    assert isinstance(made, penstock.DataLoader)
    config = config_of(made)
    assert (config.worker_type, config.errors, config.ring_bytes) == ("thread", "skip", 1 << 20)
    assert made.num_workers == 3


def test_a_paused_thread_source_makes_no_samples() -> None:
    made: list[int] = []

    class Noting(Numbered):
        def __getitem__(self, index: int) -> Any:
            made.append(index)
            return super().__getitem__(index)

    source = ThreadSource(
        AS_IS, lambda: penstock.DataLoader(Noting(1000), batch_size=1, num_workers=1, worker_type="thread")
    )
    source.open()
    source.next_batch()
    source.pause()
    drawn = [source.next_batch() for _ in range(max(0, len(made) - 2))]  # takes what lies ready; no more can come
    count = len(made)
    source.resume()
    source.next_batch()
    for _ in range(4):
        source.next_batch()
    source.close()
    assert count - len(drawn) <= 4
    assert len(made) > count


# ── profile ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_synchronizing_call_is_recorded_with_the_users_line_and_torchs_own_are_not() -> None:
    recorder = StepCallRecorder()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        recorder.enter()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()  # reads its own step counters
        float(loss.detach())
        torch.ones(2).to("cpu", non_blocking=True)
        recorder.leave()
    calls = recorder.result()
    assert [(call.what, "float(loss.detach())" in call.line) for call in calls.synchronizing] == [("float()", True)]
    assert [call.what for call in calls.pageable_copies] == [".to(..., non_blocking=True)"]


def test_only_calls_that_every_step_makes_are_recorded() -> None:
    recorder, total = StepCallRecorder(), torch.ones(1)
    for number in range(3):
        recorder.enter()
        if number == 1:
            total.item()
        recorder.leave()
    assert recorder.result().synchronizing == ()


def test_a_value_that_is_made_of_the_hosts_numbers_waits_for_no_device() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there the device of a tensor says it")
    recorder, weight = StepCallRecorder(), torch.ones(2)
    recorder.enter()
    flips = torch.rand(()) * 2 < 1.0
    total = torch.zeros(())
    assert bool(flips) is not None
    total += weight.sum()
    assert total.item() == 2.0
    recorder.leave()
    assert ["total.item()" in call.line for call in recorder.result().synchronizing] == [True]


def test_an_image_that_is_shrunk_right_after_its_decode_is_recorded(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "large.jpg"
    Image.effect_noise((800, 600), 60).convert("RGB").save(file)
    recorder = ImageDecodeRecorder()
    with recorder.recording(), Image.open(file) as image:
        image.resize((80, 60))
    found = recorder.result()
    assert found is not None
    assert (found.decoded_size, found.kept_size, found.format, round(found.pixel_ratio)) == (
        (800, 600),
        (80, 60),
        "JPEG",
        100,
    )
    assert found.full_decode_s is not None
    assert found.reduced_decode_s is not None


def test_an_image_whose_decoder_reduced_it_is_not_reported(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "large.jpg"
    Image.effect_noise((800, 600), 60).convert("RGB").save(file)
    recorder = ImageDecodeRecorder()
    with recorder.recording(), Image.open(file) as image:
        image.draft("RGB", (100, 75))
        image.resize((80, 60))
    found = recorder.result()
    assert found is not None
    assert found.pixel_ratio < 4


class ManyObjects(Dataset):
    """Has many Python objects, and reads some for each sample."""

    def __init__(self) -> None:
        self.names = [(str(number), float(number)) for number in range(200_000)]

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> float:
        return sum(self.names[(index * 7919 + step * 104_729) % 200_000][1] for step in range(8))


def test_memory_that_reading_copies_into_a_worker_is_measured() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        torch.ones(1 << 22).sum()  # OpenMP's threads run from now on, and a fork does not copy them
    finally:
        torch.set_num_threads(threads)
    found = measure_copy_on_write(DataLoader(ManyObjects(), batch_size=8, num_workers=1, shuffle=True), 20.0)
    assert found is not None
    assert (found.attribute, found.objects) == ("self.names", 200_000)
    assert found.nbytes > 1000 * found.samples
    assert found.repeat_nbytes < found.nbytes / 4


@functools.cache
def _remembered(number: float) -> torch.Tensor:
    return torch.full((1 << 14,), number)


class Remembering(Numbered):
    """Its module keeps what it makes, and asks for something new each time."""

    def __getitem__(self, index: int) -> Any:
        return _remembered(time.perf_counter())


def test_a_cache_of_the_datasets_module_that_grows_in_a_worker_is_named() -> None:
    growth = measure_copy_on_write(DataLoader(Remembering(400), batch_size=8, num_workers=1), 20.0)
    assert growth is not None
    measured = Measurements(name="", machine=Machine(), settings=Settings(dataset="D"), has_step=True)
    (finding,) = diagnose(replace(measured, copy_on_write=growth)).findings
    assert finding.name == "kept-by-the-dataset"
    assert "the lru_cache of _remembered had more elements" in finding.evidence
    assert "maxsize=" in finding.remedy


def test_an_array_in_the_dataset_does_not_count_as_python_objects() -> None:
    class Table(Numbered):
        rows = np.zeros((100_000, 4))

    assert find_object_heavy_attribute(Table(8)) is None
    assert measure_copy_on_write(DataLoader(Numbered(64), batch_size=8, num_workers=1), 1.0) is None


def test_the_quota_of_either_version_of_control_groups_is_read(tmp_path: Path) -> None:
    assert MachineLimits(tmp_path, tmp_path).measure().quota_cores is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert MachineLimits(tmp_path, tmp_path).measure().quota_cores == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert MachineLimits(tmp_path, tmp_path).measure().quota_cores is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert MachineLimits(tmp_path, tmp_path).measure().quota_cores == 2.0


def test_what_other_programs_use_is_measured_without_this_program_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own_s = proc.own_s()
    child = multiprocessing.get_context("fork").Process(target=sum, args=(range(20_000_000),))
    child.start()
    child.join()
    used_s = proc.own_s() - own_s
    assert used_s > 0.05
    monkeypatch.setattr(proc, "busy_s", lambda: 100.0)
    monkeypatch.setattr(proc, "own_s", lambda: 10.0)
    limits = MachineLimits(tmp_path, tmp_path)
    monkeypatch.setattr(proc, "busy_s", lambda: 103.0)
    monkeypatch.setattr(proc, "own_s", lambda: 11.0)
    assert limits.measure().others_cores == pytest.approx(2.0)
    monkeypatch.setattr(proc, "busy_s", lambda: None)
    assert limits.measure().others_cores is None


def test_throttled_time_is_counted_from_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 1000000\n")
    limits = MachineLimits(tmp_path, tmp_path)
    (tmp_path / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 3500000\n")
    assert limits.measure().throttled_s == 2.5


def test_threads_that_compute_at_the_same_time_are_counted_although_they_share_a_core() -> None:
    threads = [
        threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"penstock", b"valve", 400_000)) for _ in range(3)
    ]
    before_s, began = proc.runnable_s(os.getpid()), time.perf_counter()
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    runnable = (proc.runnable_s(os.getpid()) - before_s) / (time.perf_counter() - began)
    for thread in threads:
        thread.join()
    assert runnable > processors._CONTENDING_WORKER_CORES


def test_a_time_limit_raises_again_if_its_exception_was_swallowed() -> None:
    raised = 0
    with time_limit(0.05, TimeoutError):
        while raised < 2:
            try:
                time.sleep(60)
            except TimeoutError:
                raised += 1
    assert raised == 2


def test_a_sleeping_thread_is_distinguished_from_one_that_computes() -> None:
    before = proc.thread_times()
    time.sleep(0.05)
    after = proc.thread_times()
    assert after.wall_s - before.wall_s > 5 * (after.ran_s - before.ran_s)


def test_batches_are_equal_when_all_their_values_are() -> None:
    one = {"x": torch.ones(2), "names": ["a", "b"]}
    assert batches_equal(one, {"x": torch.ones(2), "names": ["a", "b"]})
    assert not batches_equal(one, {"x": torch.ones(2), "names": ["a", "c"]})
    assert not batches_equal(one, {"x": torch.zeros(2), "names": ["a", "b"]})


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────

_LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
print("made")
def main():
    loader = DataLoader(TensorDataset(torch.arange(4096.0)), batch_size=8, pin_memory=False)
    return loader, lambda batch: sum(range(400_000))
def faulty():
    loader, step = main()
    return loader, lambda batch: (step(batch), batch[0].sum().item())
loader = main()[0]
"""
_SCRIPT = """
import sys
print(sys.argv[0], sys.argv[1:])
if __name__ == "__main__":
    for batch in loader:
        batch[0].sum()
    raise SystemExit(0)
"""


@pytest.fixture
def _loop_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "doctored.py").write_text(_LOOP)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("doctored", None)


@pytest.mark.usefixtures("_loop_here")
def test_the_command_prints_the_verdict_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "doctored:main", "--seconds", "1.5"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"doctored:main: (HEALTHY|the bottleneck is)", out)
    assert "What if loading were free?" in out


@pytest.mark.usefixtures("_loop_here")
def test_check_fails_if_something_needs_to_be_changed_and_only_json_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = Diagnosis(verdict=Finding(name="x", cause="", evidence="", remedy="change it"), findings=())
    monkeypatch.setattr("penstock.observe.doctor.causes.diagnose", lambda found: faulty)
    assert cli.main(["doctor", "doctored:faulty", "--seconds", "0.6", "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["name"] == "x"
    healthy = Diagnosis(verdict=Finding(name="healthy", cause="", evidence="", remedy=""), findings=())
    monkeypatch.setattr("penstock.observe.doctor.causes.diagnose", lambda found: healthy)
    assert cli.main(["doctor", "doctored:main", "--seconds", "0.6", "--check"]) == 0


@pytest.mark.usefixtures("_loop_here")
def test_a_loader_may_be_given_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "doctored:loader", "--seconds", "0.6"]) == 0
    assert "TensorDataset" in capsys.readouterr().out


@pytest.mark.usefixtures("_loop_here")
def test_a_script_is_examined_with_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text(_LOOP + _SCRIPT)
    before = sys.argv, sys.modules["__main__"]
    assert cli.main(["doctor", "--seconds", "0.6", "--json", "train.py", "--seconds", "x"]) == 0
    out = capsys.readouterr()
    assert (json.loads(out.out)["measurements"]["name"], "['--seconds', 'x']" in out.err) == ("train.py", True)
    assert cli.main(["doctor", "train:main", "--seconds", "0.6", "--", "--epochs", "3"]) == 0
    assert f"{tmp_path}/train.py ['--epochs', '3']" in capsys.readouterr().err
    assert (sys.argv, sys.modules["__main__"]) == before
    sys.modules.pop("train", None)


@pytest.mark.usefixtures("_loop_here")
def test_an_exception_of_the_program_is_shown_with_its_own_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken.py").write_text("import absent_library\n")
    for command in (["broken:main"], ["broken.py"]):
        assert cli.main(["doctor", *command]) == 2
        err = capsys.readouterr().err
        assert f'Traceback (most recent call last):\n  File "{tmp_path}/broken.py", line 1' in err
        assert "absent_library" in err
    (tmp_path / "leaves.py").write_text("raise SystemExit('give --data')\n")
    assert cli.main(["doctor", "leaves.py"]) == 2
    assert "give --data" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["nowhere:loader"], ["nowhere"], ["os:sep"], ["x:y", "--seconds", "0"]])
def test_nothing_to_examine_is_one_line_and_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *args]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("penstock doctor: importing")]
    assert len(lines) == 1


@pytest.mark.parametrize("is_cycle", [True, False])
def test_a_time_limit_waits_until_a_finalizer_is_through(is_cycle: bool) -> None:
    class OverError(Exception):
        pass

    class Slow:
        def __init__(self) -> None:
            self.itself = self if is_cycle else None

        def __del__(self) -> None:
            time.sleep(0.6)  # alarms come meanwhile; an error would be reported as ignored, which is a failure here

    def collect() -> None:
        Slow()
        gc.collect()
        time.sleep(60)

    with pytest.raises(OverError), time_limit(0.1, OverError):
        collect()


def test_a_time_limit_waits_until_a_descriptor_that_a_worker_sent_is_in_hand() -> None:
    class Sent:
        def detach(self) -> int:
            received.append(os.open(os.devnull, os.O_RDONLY))
            time.sleep(0.6)  # alarms come meanwhile
            return received[0]

    class Storages:
        _new_shared_fd_cpu = staticmethod(lambda fd, size: torch.UntypedStorage(size))

    def receive() -> None:
        rebuild_storage_fd(Storages, Sent(), 8)
        time.sleep(60)

    received: list[int] = []
    with pytest.raises(TimeoutError), time_limit(0.1, TimeoutError):
        receive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(received[0])


@pytest.mark.parametrize("has_generator", [False, True])
def test_the_first_steps_of_a_seeded_program_are_those_that_it_does_without_the_doctor(has_generator: bool) -> None:
    def train(seen: list[torch.Tensor], most: int = 1 << 30) -> None:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1) if has_generator else None
        for _, numbers in DataLoader(Numbered(4096), batch_size=8, shuffle=True, generator=generator):
            seen.append(numbers * torch.rand(8))
            if len(seen) == most:
                return

    alone: list[torch.Tensor] = []
    train(alone, 4)
    examined: list[torch.Tensor] = []
    examine(lambda: train(examined), seconds=1.0)
    assert all(map(torch.equal, alone, examined))
