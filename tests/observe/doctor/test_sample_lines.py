"""Lines of a dataset that do for every sample what is done once: each is found where it stands, with its advice."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import multiprocessing
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_sets import Numbered
from torch.utils.data import DataLoader

from penstock.observe.doctor.causes import diagnose
from penstock.observe.doctor.measurements import Machine, Measurements, Settings
from penstock.observe.doctor.probe_results import HotLine, Hotspot, RepeatedRead, SampleCosts
from penstock.observe.doctor.probes.line_sampler import LineSampler, find_line
from penstock.observe.doctor.probes.repeated_reads import ReadRecorder
from penstock.observe.doctor.probes.sample_cost import SampleProbe
from penstock.observe.doctor.probes.worker_noise import measure_worker_noise
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.doctor.trial import AS_IS, FREE, TimingWindow, Trial


class Zipped(Numbered):
    """Reads through a compressed file for every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.path = folder / "rows.gz"
        with gzip.open(self.path, "wb") as file:
            file.write(np.random.default_rng(0).bytes(1 << 19))

    def __getitem__(self, index: int) -> Any:
        with gzip.open(self.path) as file:
            return torch.from_numpy(np.frombuffer(file.read()[:64], np.uint8).copy())


class Connecting(Numbered):
    """Connects to a database for every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.path = folder / "rows.db"
        with sqlite3.connect(self.path) as database:
            database.execute("create table rows (number integer, value real)")
            database.executemany("insert into rows values (?, ?)", [(number, 0.5) for number in range(2000)])
        database.close()

    def __getitem__(self, index: int) -> Any:
        with contextlib.closing(sqlite3.connect(self.path)) as database:
            row = database.execute("select * from rows where value < 0").fetchall()
        return torch.tensor(len(row))


class Logging(Numbered):
    """Logs every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.logger = logging.getLogger("penstock.tests.samples")
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.handlers = [logging.FileHandler(folder / "samples.log", delay=True)]

    def __getitem__(self, index: int) -> Any:
        for _ in range(20):
            self.logger.info("sample %d", index)
        return torch.tensor(index)


class Parsing(Numbered):
    """Parses all labels for every sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.path = folder / "labels.json"
        self.path.write_text(json.dumps({str(number): [number] for number in range(5000)}))

    def __getitem__(self, index: int) -> Any:
        with open(self.path) as file:
            labels = json.load(file)
        return torch.tensor(labels[str(index)])


class Pooled(Numbered):
    """Computes each sample with threads that hold Python's lock."""

    def __init__(self, folder: Path) -> None:
        super().__init__(512)
        self.pool = ThreadPoolExecutor(4)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(sum(self.pool.map(lambda rows: sum(number & 3 for number in range(rows)), [40_000] * 4)))


def _measure(dataset: Any) -> Measurements:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=8)
    for seconds in (0.3, 1.0, 3.0, 12.0):  # on a busy machine it takes longer until the thread has been looked at often
        probe = SampleProbe(loader, seconds)
        probe.run()
        assert probe.error == ""
        found = _measured(probe.costs())
        if diagnose(found).findings:
            break
    return found


def _measured(samples: SampleCosts | None) -> Measurements:
    windows = tuple(
        TimingWindow(batches=1, wall_s=wall_s, wait_s=wall_s - 0.001, step_s=0.001) for wall_s in (1.0, 1.0)
    )
    free = tuple(TimingWindow(batches=1, wall_s=0.001, wait_s=0.0, step_s=0.001) for _ in windows)
    return Measurements(
        name="x",
        machine=Machine(cores=1),
        settings=Settings(dataset="D"),
        has_step=True,
        trials=(Trial(name=AS_IS, windows=windows), Trial(name=FREE, windows=free)),
        samples=samples,
    )


@pytest.fixture
def _closed_logs() -> Iterator[None]:
    yield
    for handler in logging.getLogger("penstock.tests.samples").handlers:
        handler.close()


@pytest.mark.usefixtures("_closed_logs")
@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (Zipped, "opened-for-each-sample", "gzip"),
        (Connecting, "database-for-each-sample", "sqlite3.connect|database.execute"),
        (Parsing, "read-again-for-each-sample", "with open(self.path)"),
        (Logging, "logging-per-sample", "self.logger.info"),
        (Pooled, "threads-hold-each-other", "self.pool.map"),
    ],
)
def test_what_is_done_for_every_sample_is_named_with_its_line(kind: Any, name: str, text: str, tmp_path: Path) -> None:
    dataset = kind(tmp_path)
    found = _measure(dataset)
    if kind is Pooled:
        dataset.pool.shutdown()
        assert found.samples is not None
        assert 0 < found.samples.other_threads_cores < THRESHOLDS.one_core_high
        found = replace(found, samples=replace(found.samples, other_threads_cores=0.9))  # a busy machine leaves less
    diagnosis = diagnose(found)
    assert diagnosis.findings[0].name == name, diagnosis
    assert "test_sample_lines.py:" in diagnosis.findings[0].evidence
    assert any(words in diagnosis.findings[0].evidence for words in text.split("|"))
    assert diagnosis.verdict.remedy == diagnosis.findings[0].remedy


def test_a_row_of_a_table_and_another_process_are_known_by_the_library_that_a_line_calls(tmp_path: Path) -> None:
    found = _measure(Zipped(tmp_path))
    assert found.samples is not None
    for line, calls, name in [
        ("train.py:3: row = self.table.iloc[index]", "pandas.core.indexing._iLocIndexer._getitem_axis", "table-row"),
        ("train.py:3: row = self.rows[index]", "multiprocessing.connection.Connection._recv", "another-process"),
    ]:
        samples = replace(found.samples, lines=(HotLine(line=line, calls=calls, fraction=0.8),))
        finding = diagnose(replace(found, samples=samples)).findings[0]
        assert finding.name.startswith(name)
        assert finding.gain == pytest.approx(5.0, rel=0.1)


def _named(*lines: HotLine, **changes: Any) -> list[str]:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=0.01, median_s=0.01, lines=lines, transform_fraction=1.0)
    costs = replace(costs, storage_fraction=0.0, decode_fraction=0.0, **changes)
    return [finding.name for finding in diagnose(_measured(costs)).findings]


@pytest.mark.parametrize(
    ("line", "calls", "name"),
    [
        ("raw = zlib.decompress(self.packed[index])", "", "decompressed-for-each-sample"),
        ('return file["image"]', "numpy.lib._npyio_impl.NpzFile.__getitem__", "decompressed-for-each-sample"),
        ("raw = lz4.frame.decompress(row)", "", "decompressed-for-each-sample"),
        ("with gzip.open(path) as file:", "gzip.open", "opened-for-each-sample"),
        ("with shelve.open(self.path) as rows:", "shelve.open", "opened-for-each-sample"),
        ("os.fsync(file.fileno())", "", "written-for-each-sample"),
        ("print(index, label)", "", "written-for-each-sample"),
        ('with open(self.log, "a") as file:', "", "written-for-each-sample"),
        (
            'rows = self.table.query(f"user == {index}")',
            "pandas.core.frame.DataFrame.query",
            "searched-for-each-sample",
        ),
        (
            'rows = self.df[self.df["user"] == index]',
            "pandas.core.frame.DataFrame.__getitem__",
            "searched-for-each-sample",
        ),
        (
            'mine = events.loc[events["user"].eq(user)].sort_values("time")',
            "pandas.core.frame.DataFrame.sort_values",
            "searched-for-each-sample",
        ),
        (
            "mine = df[(df.user == user) & (df.day < 9)]",
            "pandas.core.frame.DataFrame.__getitem__",
            "searched-for-each-sample",
        ),
        ('is_mine = table["user"] == user', "pandas.core.ops.common.new_method", "searched-for-each-sample"),
        (
            'x = window["close"].rolling(8).mean()',
            "pandas.core.window.rolling.Rolling.mean",
            "table-row-for-each-sample",
        ),
        ("rows = [row for row in self.rows if row.user == index]", "", "searched-for-each-sample"),
        ("at = self.names.index(name)", "", "searched-for-each-sample"),
        ("at = np.where(self.users == index)[0]", "", "searched-for-each-sample"),
        ("row = self.table.iloc[index]", "pandas.core.indexing._iLocIndexer", "table-row-for-each-sample"),
        ('out = subprocess.run(["ffmpeg", path])', "subprocess.run", "another-process-for-each-sample"),
        ("row = events.iloc[[i]].merge(users)", "pandas.core.frame.DataFrame.merge", "joined-for-each-sample"),
        ("return self.blur(image)", "", "costly-line"),
    ],
)
def test_a_costly_line_is_named_by_what_it_does(line: str, calls: str, name: str) -> None:
    found = HotLine(line=f"train.py:3: {line}", calls=calls, fraction=0.8)
    assert _named(found) == [name]
    assert _named(replace(found, fraction=0.2)) == []


def test_a_function_is_named_where_its_time_is_divided_between_its_lines() -> None:
    lines = tuple(HotLine(line=f"train.py:{at}: end -= {at}", fraction=0.3) for at in (3, 4, 5))
    spot = Hotspot(where="tokenize (train.py:2)", fraction=0.8)
    assert _named(*lines[:1]) == [], "no line is most of it"
    assert _named(*lines, hotspots=(spot,)) == ["costly-line"]
    assert _named(*lines[:1], hotspots=(replace(spot, where="posix.read", caller=spot.where),)) == []
    assert _named(*lines) == ["costly-line"], "together they are most of it"


def test_lines_that_handle_far_more_numbers_than_their_sample_keeps_are_to_come_after_its_crop() -> None:
    lines = tuple(HotLine(line=f"train.py:{at}: image = image / {at}", fraction=0.25, values=90_000) for at in (3, 4))

    def remedy(*lines: HotLine) -> str:
        costs = SampleCosts(
            samples=64,
            batch_samples=8,
            sample_s=0.01,
            median_s=0.01,
            lines=lines,
            transform_fraction=1.0,
            storage_fraction=0.0,
            decode_fraction=0.0,
            values_per_sample=10_000,
        )
        return diagnose(_measured(costs)).verdict.remedy

    assert "do that first" in remedy(*lines)
    assert "do that first" in remedy(replace(lines[0], fraction=0.8))
    assert "do that first" not in remedy(*(replace(line, values=20_000) for line in lines))
    assert "do that first" not in remedy(replace(lines[0], line="train.py:3: image = resize(image)", fraction=0.8))


def _frame(code: CodeType, line: int | None, caller: Any = None) -> Any:
    return SimpleNamespace(f_code=code, f_lineno=line, f_lasti=10_000, f_globals={"__name__": "lib"}, f_back=caller)


def test_an_instruction_that_belongs_to_no_line_is_that_of_the_line_before() -> None:
    code = _named.__code__
    file, number = find_line(_frame(code, None)) or ("", 0)
    assert (file, number) == (__file__, max(line for _, _, line in code.co_lines() if line is not None))


def test_what_a_line_calls_does_not_divide_its_time() -> None:
    sampler = LineSampler()
    user = _frame(_named.__code__, 7)
    for library in (json.loads, gzip.open, json.dumps) * 5:
        sampler.look(0, _frame(library.__code__, 1, user))
    (line,) = sampler.lines()
    assert line.fraction == pytest.approx(1.0)
    assert line.calls.startswith("lib.")


def test_what_the_doctors_own_hooks_take_inside_of_a_line_is_that_lines() -> None:
    hook = _frame(ReadRecorder.note.__code__, 1, _frame(json.loads.__code__, 1, _frame(_named.__code__, 7)))
    assert find_line(hook) == (__file__, 7)
    loader = _frame(SampleProbe.run.__code__, 1, _frame(_named.__code__, 7))
    assert find_line(loader) is None, "a library's dataset is no line of the program that has its loader"


class Cropping(Numbered):
    """Computes with an image that it crops afterwards, one of many that it keeps."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.images = np.ones((8, 300, 300), np.float32)

    def __getitem__(self, index: int) -> Any:
        images = self.images
        image = images[index % 8]
        for _ in range(20):
            image = np.sqrt(image)
        return image[:30, :30].copy()


def test_the_numbers_that_a_line_handles_are_those_of_its_sample_and_not_of_the_whole_dataset() -> None:
    costs = _measure(Cropping(64)).samples
    assert costs is not None
    assert (costs.lines[0].values, costs.values_per_sample) == (300 * 300, 30 * 30)


def test_a_line_that_uses_nothing_of_the_sample_is_named_before_it_is_called_costly() -> None:
    line = HotLine(line="train.py:3: table = {word: n for n, word in words}", fraction=0.8, is_same_for_all=True)
    assert _named(line) == ["same-for-every-sample"]
    assert _named(replace(line, is_same_for_all=False)) == ["costly-line"]


def test_a_sample_that_reads_many_times_its_size_is_told_from_one_that_reads_what_it_keeps() -> None:
    line = HotLine(line="train.py:3: image = np.load(self.files[i // 256])[i % 256]", fraction=0.8)
    sizes = {"batch_nbytes": 8 << 14, "read_nbytes": 64 << 22}
    assert _named(line, **sizes) == ["reads-more-than-it-keeps"]
    assert _named(line, **sizes | {"read_nbytes": 64 << 14}) == ["costly-line"]


def test_the_part_that_cheap_samples_spend_in_their_only_line_is_no_finding() -> None:
    line = HotLine(line="train.py:3: return self.x[index]", fraction=0.9)
    assert _named(line, median_s=2e-5) == []
    costs = SampleCosts(
        samples=64, batch_samples=8, sample_s=2e-5, median_s=2e-5, lines=(line,), transform_fraction=1.0
    )
    measured = _measured(replace(costs, storage_fraction=0.0, decode_fraction=0.0))
    assert "__getitems__" in diagnose(measured).verdict.remedy
    stream = replace(measured, settings=replace(measured.settings, is_iterable=True))
    assert "batch_size=None" in diagnose(stream).verdict.remedy


class Searching(torch.utils.data.Sampler[int]):
    """Looks at all of a list for each index."""

    def __iter__(self) -> Iterator[int]:
        return (sum(number == index for number in range(5000)) + index - 1 for index in range(64))


def test_the_time_of_a_sampler_is_measured_beside_that_of_its_samples() -> None:
    for sampler, is_slow in ((Searching(), True), (None, False)):
        probe = SampleProbe(DataLoader(Numbered(64), batch_size=8, sampler=sampler), 0.3)
        probe.run()
        costs = probe.costs()
        assert costs is not None
        assert (costs.sampler_s > costs.batch_s) is is_slow


def test_a_collate_function_of_the_programs_own_is_named_where_it_takes_most_of_a_batch() -> None:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=1e-4, median_s=1e-4, collate_s=0.005)
    measured = _measured(costs)
    for own, names in ((True, ["costly-collate"]), (False, [])):
        settings = replace(measured.settings, collates_by_default=not own)
        assert [one.name for one in diagnose(replace(measured, settings=settings)).findings] == names


def test_an_estimate_is_no_more_than_what_free_loading_gained(tmp_path: Path) -> None:
    found = _measure(Zipped(tmp_path))
    assert found.samples is not None
    line = HotLine(line="train.py:3: row = self.table.iloc[index]", calls="", fraction=0.8)
    free = Trial(name=FREE, windows=(TimingWindow(batches=1, wall_s=0.4, wait_s=0.0, step_s=0.4),) * 2)
    measured = replace(found, samples=replace(found.samples, lines=(line,)), trials=(*found.trials[:1], free))
    gain = diagnose(measured).findings[0].gain
    assert gain is not None
    assert 2.0 < gain <= 2.5, "0.4 s of free loading and what is left, in the place of 1 s"


def test_a_line_of_the_users_own_that_matches_nothing_is_named_in_the_advice(tmp_path: Path) -> None:
    found = _measure(Zipped(tmp_path))
    line = HotLine(line="train.py:3: return self.blur(image)", calls="", fraction=0.8)
    samples = replace(found.samples, lines=(line,), repeated_read=None, transform_fraction=1.0, storage_fraction=0.0)  # type: ignore[type-var]
    assert "train.py:3: return self.blur(image)" in diagnose(replace(found, samples=samples)).verdict.remedy


def _reading(read: RepeatedRead, *lines: HotLine) -> Measurements:
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=0.01, median_s=0.01, repeated_read=read, lines=lines)
    return _measured(costs)


def test_the_finding_says_what_to_read_once() -> None:
    read = RepeatedRead(name="all.npy", is_folder=False, line="train.py:9: a = np.load(path)", fraction=0.8, samples=64)
    finding = diagnose(_reading(read)).findings[0]
    assert finding.name == "read-again-for-each-sample"
    assert finding.cause.endswith("all.npy.")
    assert finding.remedy.startswith("train.py:9: read it once, in __init__")
    assert finding.gain == pytest.approx(5.0, rel=0.01)
    assert "list it once" in diagnose(_reading(replace(read, is_folder=True))).findings[0].remedy
    assert not diagnose(_reading(replace(read, fraction=0.3))).findings


def test_an_archive_is_named_as_such_alone() -> None:
    read = RepeatedRead(name="a.gz", is_folder=False, line="train.py:9: gzip.open(path)", fraction=0.8, samples=64)
    line = HotLine(line="train.py:9: file = gzip.open(path)", calls="gzip.open", fraction=0.8)
    assert [finding.name for finding in diagnose(_reading(read, line)).findings] == ["opened-for-each-sample"]


@pytest.mark.parametrize(
    ("line", "calls", "name"),
    [
        ('train.py:9: torch.save(model.state_dict(), "last.pt")', "torch.serialization.save", "saves-every-step"),
        ("train.py:9: save_checkpoint(model)", "", "saves-every-step"),
        ("train.py:9: gc.collect()", "", "collects-garbage-every-step"),
        ("train.py:9: torch.cuda.empty_cache()", "torch.cuda.memory.empty_cache", "collects-garbage-every-step"),
        ('train.py:9: writer.add_scalar("loss", loss, step)', "", "logs-every-step"),
        ("train.py:9: best = copy.deepcopy(model.state_dict())", "copy.deepcopy", "copied-every-step"),
        ("train.py:9: self.seen = torch.cat([self.seen, out])", "", "appended-every-step"),
        ("train.py:9: auc = roc_auc_score(y, p)", "sklearn.metrics._ranking.roc_auc_score", "measures-every-step"),
        ('train.py:9: logger.info("loss %s", loss)', "logging.Logger.info", "logs-every-step"),
    ],
)
def test_what_every_step_does_is_named_with_what_it_costs(line: str, calls: str, name: str) -> None:
    found = HotLine(line=line, calls=calls, fraction=0.8)
    windows = (TimingWindow(batches=1, wall_s=1.0, wait_s=0.0, step_s=1.0),) * 2
    measured = replace(_measured(None), trials=(Trial(name=AS_IS, windows=windows),), step_lines=(found,))
    diagnosis = diagnose(measured)
    assert (diagnosis.verdict.name, [one.name for one in diagnosis.findings]) == ("compute-bound", [name])
    assert diagnosis.findings[0].gain == pytest.approx(5.0)
    assert "train.py:9" in diagnosis.findings[0].evidence
    for other in (
        replace(found, turns_fraction=0.1),  # once in a while
        replace(found, fraction=0.15),
        replace(found, line="train.py:9: loss.backward()", calls="torch._tensor.Tensor.backward"),
    ):
        assert diagnose(replace(measured, step_lines=(other,))).findings == ()
    waiting = replace(measured, trials=_measured(None).trials)
    assert not any(one.name == name for one in diagnose(waiting).findings), "the step is not what takes the time"


class Flawed(Numbered):
    """One sample divides by zero."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([1.0]) / (0.0 if index == 3 else 2.0), "label": "a"}


def test_a_sample_with_a_value_that_is_not_finite_is_named() -> None:
    finding = diagnose(_measure(Flawed(64))).findings[0]
    assert (finding.name, "dataset[3]" in finding.evidence) == ("values-not-finite", True)


class Noisy(Numbered):
    """Draws from a generator of its own, or from NumPy's."""

    def __init__(self, size: int, *, own: bool) -> None:
        super().__init__(size)
        self.random = np.random.default_rng(0) if own else np.random

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.random.normal(index, 1.0, 4))


@pytest.mark.usefixtures("preloaded_python")
def test_a_generator_that_workers_have_a_copy_of_is_found_and_numpys_own_is_not() -> None:
    fork = multiprocessing.get_context("fork")
    for own, repeats in ((True, True), (False, False)):
        loader = DataLoader(Noisy(64, own=own), batch_size=4, num_workers=2, multiprocessing_context=fork)
        noise = measure_worker_noise(loader)
        assert noise is not None
        assert (noise.same_in_workers, noise.same_in_epochs) == (repeats, repeats)
    assert measure_worker_noise(DataLoader(Numbered(64), batch_size=4, num_workers=2)) is None


_ROTATES = HotLine(line="train.py:9: image = image.rotate(angle)", calls="PIL.Image.Image.rotate", fraction=0.6)


@pytest.mark.parametrize(
    ("line", "calls", "name"),
    [
        ("self.shown[i] += 1", "multiprocessing.managers.BaseProxy._callmethod", "another-process-for-each-sample"),
        ("logger.info(index)", "logging.Logger.info", "logging-per-sample"),
        ('out = subprocess.run(["ffmpeg", path])', "subprocess.run", "costly-line"),
        ("answer = self.pipe.recv()", "multiprocessing.connection.Connection.recv", "costly-line"),
        ("np.save(cached, image)", "numpy.lib._npyio_impl.save", "costly-line"),
    ],
)
def test_what_is_done_for_nothing_is_named_before_work_that_takes_longer(line: str, calls: str, name: str) -> None:
    assert _named(_ROTATES, HotLine(line=f"train.py:7: {line}", calls=calls, fraction=0.25)) == [name]


def test_a_little_waste_is_not_named_and_waste_gains_no_more_than_its_time() -> None:
    proxy = "multiprocessing.managers.BaseProxy._callmethod"
    little = HotLine(line="train.py:7: self.shown[i] += 1", calls=proxy, fraction=0.12)
    assert _named(_ROTATES, little) == ["costly-line"]
    costs = SampleCosts(samples=64, batch_samples=8, sample_s=0.01, median_s=0.01, transform_fraction=1.0)
    costs = replace(costs, storage_fraction=0.0, decode_fraction=0.0, lines=(_ROTATES, replace(little, fraction=0.25)))
    (finding,) = diagnose(_measured(costs)).findings
    assert finding.gain is None or finding.gain <= 1 / (1 - 0.25) + 1e-9
