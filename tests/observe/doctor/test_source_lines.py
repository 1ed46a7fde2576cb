"""What a line computes for every sample alike is told from its source, and what may differ is left alone."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from penstock.observe.doctor.probes import line_sampler
from penstock.observe.doctor.probes.line_sampler import LineSampler
from penstock.observe.doctor.probes.source_lines import is_random, is_same_for_all, line_text, statements_at


def _line_in(folder: Path, method: str, line: str) -> tuple[str, int]:
    body = "".join(f"        {one}\n" for one in ("words = self.words", "key = index + 1", line, "return made"))
    text = f"class Data:\n    {method}\n{body}"
    file = folder / "train.py"
    file.write_text(text)
    return str(file), text[: text.index(line)].count("\n") + 1


@pytest.mark.parametrize(
    "line",
    [
        "made = {word: number for number, word in enumerate(self.words)}",
        "made = sorted(self.names)",
        "made = dict(zip(words, range(len(words))))",
        "made = Compose([Resize(32), Normalize(MEAN, STD)])",
        "made = table = np.stack(self.rows).mean(0)",
    ],
)
def test_what_is_made_of_the_datasets_attributes_alone_is_the_same_for_all_samples(line: str, tmp_path: Path) -> None:
    file, number = _line_in(tmp_path, "def __getitem__(self, index):", line)
    assert is_same_for_all(file, number)


@pytest.mark.parametrize(
    "line",
    [
        "made = [row for row in self.rows if row.key == index]",
        "made = sorted(self.names[key])",
        "made = self.decode(self.words)",  # a method may read what it likes
        "made = torch.rand(len(self.words))",
        "made = next(iter(self.stream))",
        "self.made = sorted(self.names)",  # kept, so that it is done once
        "made = self.words",  # costs nothing
        "made = time.perf_counter()",
    ],
)
def test_what_may_differ_from_sample_to_sample_is_not(line: str, tmp_path: Path) -> None:
    file, number = _line_in(tmp_path, "def __getitem__(self, index):", line)
    assert not is_same_for_all(file, number)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("made = image.rotate(30 * rng.uniform())", True),
        ("angle = torch.rand(()).item(); turned = image.rotate(angle); made = turned.resize(self.size)", True),
        ("made = stft(self.waves[index] + np.random.normal(size=16000))", True),
        ("made = self.brand[index] + self.operand(index)", False),
        ("made = stft(self.waves[index])", False),
    ],
)
def test_a_line_is_random_that_computes_with_what_was_drawn(line: str, expected: bool, tmp_path: Path) -> None:
    lines = line.replace("; ", "\n        ")
    file, number = _line_in(tmp_path, "def __getitem__(self, index):", lines)
    assert is_random(file, number + lines.count("\n")) is expected


def test_a_method_without_arguments_may_return_the_next_sample(tmp_path: Path) -> None:
    file, number = _line_in(tmp_path, "def __next__(self):", "made = sorted(self.names)")
    assert not is_same_for_all(file, number)


def test_a_file_that_is_no_python_or_not_there_has_no_statements(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def f(:\n")
    assert statements_at(str(file), 1) == []
    assert not is_same_for_all(str(tmp_path / "none.py"), 3)
    assert line_text(str(file), 1) == "broken.py:1: def f(:"


@pytest.mark.parametrize(("looks", "paused", "seen"), [(20, 0, 1), (0, 20, 0), (9, 20, 0)])
def test_what_the_thread_does_while_the_sampler_is_paused_counts_for_nothing(
    looks: int, paused: int, seen: int
) -> None:
    sampler = LineSampler()
    for number in range(looks + paused):
        sampler.is_paused = number >= looks
        sampler.look(signal.SIGALRM, sys._getframe())
    assert len(sampler.lines()) == seen, "9 looks are too few to tell"


def test_a_sampler_leaves_the_alarm_that_it_found_and_calls_its_handler_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []
    monkeypatch.setattr(line_sampler, "_CHAIN_S", -1.0)
    before = signal.signal(signal.SIGALRM, lambda number, frame: called.append(number))
    signal.setitimer(signal.ITIMER_REAL, 3600.0, 60.0)
    try:
        with LineSampler() as sampler:
            sampler.start()  # once more
            sampler.look(signal.SIGALRM, sys._getframe())
        sampler.stop()
        assert called
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        assert (delay > 60.0, interval) == (True, 60.0)
        signal.raise_signal(signal.SIGALRM)
        assert len(called) > 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_than_the_main_one_gets_no_signals_and_no_lines() -> None:
    before = signal.getsignal(signal.SIGALRM)
    handlers: list[object] = []

    def run() -> None:
        with LineSampler():
            handlers.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]
