"""The panel of a run under way: what a person sees, and that nothing of it stays, whatever way the run ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launch.programs import LINES, SLOW, OnTerminal, is_given_back, penstock, python, script, shows_panel
from scripts import written

pytestmark = pytest.mark.usefixtures("preloaded_python")


def test_the_panel_shows_the_run_and_the_scripts_lines_scroll_above_it(tmp_path: Path, on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", script(tmp_path, SLOW).name, "1000")
    rows = terminal.until(lambda screen: shows_panel(screen) and "workers" in screen.text()[-3]).text()
    (tmp_path / "enough").touch()
    assert "Slow (train.py:13) · epoch" in rows[-4]
    assert "/20" in rows[-4]
    assert "left in the epoch" in rows[-4]
    assert "waited for data" in rows[-3]
    assert "ms per batch  read+decode" in rows[-2]
    assert "process" in rows[-1]
    said, code = terminal.end()
    assert code == 0
    epochs = [line for line in said if line.startswith("epoch")]
    assert said[: len(epochs)] == [f"epoch {number}" for number in range(len(epochs))]
    assert said[len(epochs)].startswith("penstock: train.py 1000 ran")
    assert not any("│" in line for line in said)
    assert is_given_back(terminal.screen)
    data = json.loads(written(tmp_path).read_text())
    times = [moment["at_s"] for moment in data["timeline"]]
    assert times == sorted(times)
    assert data["timeline"][-1]["batches"] == 20 * len(epochs)
    assert max(moment["workers"] for moment in data["timeline"]) == 2
    assert max(moment["host_nbytes"] for moment in data["timeline"]) > 0


def test_a_narrow_terminal_gets_one_row(tmp_path: Path, on_terminal: OnTerminal) -> None:
    terminal = on_terminal("run", script(tmp_path, SLOW).name, "1000", columns=60)
    rows = terminal.until(lambda screen: "samples/s" in screen.text()[-1]).text()
    (tmp_path / "enough").touch()
    assert rows[-1].startswith("penstock │ Slow: epoch")
    assert terminal.screen.bottom == LINES - 2
    assert terminal.end()[1] == 0
    assert is_given_back(terminal.screen)


def test_a_quiet_run_draws_nothing(tmp_path: Path, on_terminal: OnTerminal) -> None:
    said, code = on_terminal("run", "--quiet", script(tmp_path, SLOW).name, "1").end()
    assert (said, code) == (["epoch 0"], 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_the_terminal_is_given_back_and_the_status_is_the_signals(
    tmp_path: Path, on_terminal: OnTerminal, number: signal.Signals
) -> None:
    terminal = on_terminal("run", script(tmp_path, SLOW).name, "1000")
    terminal.until(shows_panel)
    terminal.process.send_signal(number)
    said, code = terminal.end()
    assert code == -number
    assert is_given_back(terminal.screen)
    assert any(line.startswith("penstock: train.py 1000 ran") for line in said)
    data = json.loads(written(tmp_path).read_text())
    assert data["totals"]["batches"] > 0
    assert data["exit"]["code"] == (130 if number is signal.SIGINT else None)


def test_a_run_that_is_stopped_gives_the_terminal_back_until_it_continues(
    tmp_path: Path, on_terminal: OnTerminal
) -> None:
    terminal = on_terminal("run", script(tmp_path, SLOW).name, "1000")
    terminal.until(shows_panel)
    terminal.process.send_signal(signal.SIGSTOP)
    terminal.until(is_given_back)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(shows_panel)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end()[1] == -signal.SIGTERM


def test_a_run_that_becomes_another_program_gives_the_terminal_back(tmp_path: Path, on_terminal: OnTerminal) -> None:
    text = SLOW + '\n    import os\n    os.execv(sys.executable, [sys.executable, "-c", "print(1)"])\n'
    said, code = on_terminal("run", script(tmp_path, text).name, "2").end()
    assert (said, code) == (["epoch 0", "epoch 1", "1"], 0)


def test_the_program_meets_neither_the_supervisor_nor_a_signal_handler(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal
        try:
            print(os.wait())
        except ChildProcessError:
            print("no children")
        print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT)])
        print(sorted(os.listdir("/proc/self/fd"))[:3])
        """,
    )
    plain, run = python(tmp_path, path.name), penstock(tmp_path, "run", "--quiet", path.name)
    assert run.stdout == plain.stdout
    assert "no children" in run.stdout


def test_a_run_that_leaves_by_os_exit_is_reported_with_what_it_counted(tmp_path: Path) -> None:
    path = script(tmp_path, SLOW + "\n    import os\n    os._exit(5)\n")
    run = penstock(tmp_path, "run", path.name, "8")
    assert run.returncode == 5
    assert "exit code unknown" in run.stderr
    assert "it was killed, or called os._exit" in run.stderr


def test_nothing_is_left_in_the_runtime_folder(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    path = script(tmp_path, SLOW)
    assert penstock(tmp_path, "run", path.name, "3", XDG_RUNTIME_DIR=str(runtime)).returncode == 0
    assert list((runtime / "penstock").iterdir()) == []


def test_a_runtime_folder_that_is_not_ones_own_only_costs_the_panel(tmp_path: Path) -> None:
    (tmp_path / "penstock").mkdir(mode=0o777)
    (tmp_path / "penstock").chmod(0o777)
    run = penstock(tmp_path, "run", script(tmp_path, SLOW).name, "1", XDG_RUNTIME_DIR=str(tmp_path))
    assert run.returncode == 0
    assert "80 samples in 20 batches" in run.stderr


def test_forked_workers_may_print_while_the_panel_is_drawn(tmp_path: Path, on_terminal: OnTerminal) -> None:
    path = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Loud(Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, index):
                print("sample", index)
                return torch.tensor(index)

        for epoch in range(40):
            print(sum(len(batch) for batch in DataLoader(Loud(), batch_size=4, num_workers=2)), "of epoch", epoch)
        """,
    )
    said, code = on_terminal("run", path.name).end()
    assert code == 0
    assert "40 of epoch 39" in said
    assert (
        "".join(said).partition("penstock:")[0].count("sample") == 1600
    )  # two workers' lines may meet, as under Python


def test_without_a_terminal_a_plain_line_comes_every_five_seconds(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", script(tmp_path, SLOW).name, "14")
    lines = [line for line in run.stderr.splitlines() if line.startswith("penstock: Slow (train.py:13): epoch ")]
    assert lines
    assert all("samples/s · waited for data" in line for line in lines)
    assert "\x1b" not in run.stderr


@pytest.mark.usefixtures("fresh_python")
def test_the_launcher_imports_neither_torch_nor_rich_before_the_program(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys\nprint([name for name in ('torch', 'rich', 'numpy', 'pynvml') if name in sys.modules])",
    )
    assert penstock(tmp_path, "run", "--quiet", path.name).stdout == "[]\n"
    assert written(tmp_path).exists()
