"""`penstock run` runs a script as Python would, and says afterwards where the time went."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from scripts import written

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("preloaded_python")]

TRAINING = """
    import argparse
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Pairs(TensorDataset):
        "Has workers: torch's own class is gathered in the training process."

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=2)
        parser.add_argument("--start-method", default=None)
        args = parser.parse_args()
        torch.manual_seed(0)
        dataset = Pairs(torch.arange(40.0), torch.arange(40))
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2,
                            multiprocessing_context=args.start_method)
        for epoch in range(args.epochs):
            print(epoch, [labels.tolist() for _, labels in loader])

    if __name__ == "__main__":
        main()
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)


def penstock(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "penstock", *command)


@pytest.mark.parametrize(
    "args", [("--epochs", "3"), ("--start-method", "spawn", "--epochs", "1"), ("--no-such-option",)]
)
def test_a_training_script_prints_and_ends_as_under_python(tmp_path: Path, args: tuple[str, ...]) -> None:
    _assert_as_under_python(script(tmp_path, TRAINING), args)


@pytest.mark.usefixtures("fresh_python")
@pytest.mark.parametrize(
    ("text", "args"),
    [
        pytest.param("import sys; print(sys.argv, __name__); sys.exit(3)", ("a", "--b"), id="exit code"),
        pytest.param("import sys; sys.exit('no data')", (), id="exit with words"),
        pytest.param("def f():\n    raise ValueError('x')\nf()\n", (), id="uncaught exception"),
        pytest.param("print(__file__ is not None, __spec__)", (), id="module attributes"),
        pytest.param("1 +", (), id="syntax error"),
        pytest.param(
            "def f(x: int): pass\nprint(f.__annotations__, sorted(n for n in globals() if n[0] == '_'), __builtins__)",
            (),
            id="nothing of the launcher's leaks into the script",
        ),
        pytest.param("import sys; print(sys.argv)", ("a", "--", "--json", "-m", "x"), id="awkward arguments"),
        pytest.param(
            "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())",
            (),
            id="what torch reads when it is imported",
        ),
        pytest.param(
            "import atexit\natexit.register(print, 'bye')\nprint('words')\nraise KeyboardInterrupt",
            (),
            id="exit handlers after an interrupt",
        ),
        pytest.param(
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\nprint('main')",
            (),
            id="a thread that outlives the main one",
        ),
        pytest.param(
            "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\nprint('parent')",
            (),
            id="a forked child that exits",
        ),
        pytest.param(
            "import sys\nsys.excepthook = lambda t, v, tb: print(t, tb.tb_frame.f_code.co_name)\n1 / 0",
            (),
            id="the script's own excepthook",
        ),
    ],
)
def test_a_script_prints_and_ends_as_under_python(tmp_path: Path, text: str, args: tuple[str, ...]) -> None:
    _assert_as_under_python(script(tmp_path, text), args)


def _assert_as_under_python(path: Path, args: tuple[str, ...]) -> None:
    plain = python(path.parent, path.name, *args)
    run = penstock(path.parent, "run", "--quiet", path.name, *args)
    assert run.stdout == plain.stdout
    assert run.stderr == plain.stderr
    assert run.returncode == plain.returncode


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    script(package, "import sys; from project import __name__ as n; print(n, __name__, sys.argv[1:])", "train.py")
    plain = python(tmp_path, "-m", "project.train", "--lr", "1")
    run = penstock(tmp_path, "run", "--quiet", "-m", "project.train", "--lr", "1")
    assert (run.stdout, run.stderr, run.returncode) == (plain.stdout, plain.stderr, 0)


def test_a_folder_and_a_zip_file_run_as_under_python(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    script(folder, "import sys, other; print(sys.argv, sys.path[0][-7:], __file__, __package__)", "__main__.py")
    script(folder, "", "other.py")
    shutil.make_archive(str(folder), "zip", folder)
    for target in ("app", "app.zip"):
        plain = python(tmp_path, target, "a")
        run = penstock(tmp_path, "run", "--quiet", target, "a")
        assert (run.stdout, run.stderr, run.returncode) == (plain.stdout, plain.stderr, 0)


def test_a_module_that_cannot_import_something_says_what(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    script(package, "import no_such_thing", "__init__.py")
    script(package, "", "train.py")
    run = penstock(tmp_path, "run", "--quiet", "-m", "project.train")
    assert run.stderr.endswith("ModuleNotFoundError: No module named 'no_such_thing'\n")
    assert run.returncode == 1


def test_in_an_environment_of_its_own_it_says_what_to_type(tmp_path: Path) -> None:
    path = script(tmp_path, "import timm_or_such.models")
    prefix = "/home/me/.cache/uv/builds-v0/.tmp1"
    code = f"import sys; sys.prefix = {prefix!r}\n"
    run = python(tmp_path, "-c", code + f"from penstock.cli import main; sys.exit(main(['run', {str(path)!r}]))")
    assert run.returncode == 1
    assert f"timm_or_such is not installed beside penstock, which runs in an environment of its own ({prefix})" in (
        run.stderr
    )
    assert "environment of its own" not in penstock(tmp_path, "run", str(path)).stderr


@pytest.mark.parametrize("verb", [["doctor", "train:main"], ["run", "train.py"]])
def test_without_torch_a_command_says_where_to_install_it(tmp_path: Path, verb: list[str]) -> None:
    script(tmp_path, "import torch")
    hide = """
        import sys

        class NoTorch:
            def find_spec(self, name, *_):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name=name)

        sys.meta_path.insert(0, NoTorch())
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        """
    code = f"{textwrap.dedent(hide)}\nfrom penstock.cli import main; sys.exit(main({verb!r}))"
    run = python(tmp_path, "-c", code)
    assert run.returncode == (1 if verb[0] == "run" else 2), run.stderr
    assert f"penstock: torch is not installed in {sys.prefix}: `pip install torch` there" in run.stderr


def test_the_report_covers_what_threads_load_after_the_scripts_last_line(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import threading, time, torch
        from torch.utils.data import DataLoader

        def late():
            time.sleep(0.3)
            list(DataLoader(torch.arange(10.0), batch_size=5))

        threading.Thread(target=late).start()
        """,
    )
    assert "10 samples in 2 batches" in penstock(tmp_path, "run", path.name).stderr


def test_a_run_json_that_cannot_be_written_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = script(tmp_path, "import os, sys; os.rmdir('folder'); sys.exit(4)")
    run = penstock(tmp_path, "run", "--json", "folder/run.json", path.name)
    assert run.returncode == 4
    assert "cannot be written" in run.stderr.splitlines()[-1]


def test_loaders_made_anew_for_every_epoch_are_reported_as_one(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader
        held_out = DataLoader(torch.arange(35.0), batch_size=5)
        for epoch in range(7):
            list(DataLoader(torch.arange(10.0), batch_size=5))
            list(held_out)
        """,
    )
    report = penstock(tmp_path, "run", path.name).stderr
    assert "Tensor and 6 more like it (train.py:6): 70 samples in 14 batches" in report
    assert "Tensor #2 (train.py:4): 245 samples in 49 batches" in report
    assert report.count("samples/s") == 3  # and the total


def test_an_interrupted_script_ends_by_sigint(tmp_path: Path) -> None:
    path = script(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "run", "--quiet", path.name],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


def test_the_scripts_dataloader_is_penstocks(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import torch.utils.data as d, torch.utils.data.dataloader as e; print(d.DataLoader, e.DataLoader)"
    )
    assert penstock(tmp_path, "run", path.name).stdout.count("penstock.loader.dataloader.DataLoader") == 2


def test_the_report_and_run_json_say_where_the_time_went(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINING)
    run = penstock(tmp_path, "run", "--json", "kept.json", path.name)
    for word in (
        "Pairs",
        "samples/s",
        "waited for data",
        "read+decode",
        "collate",
        "transport",
        "wait",
        "step",
        "peak",
    ):
        assert word in run.stderr
    data = json.loads((tmp_path / "kept.json").read_text())
    (loader,) = data["loaders"]
    assert data["exit"] == {"code": 0, "error": None}
    assert (loader["statistics"]["batches"], loader["statistics"]["samples"]) == (10, 80)
    assert loader["settings"]["num_workers"] == 2
    assert data["host"]["memory"]["peak_pss_nbytes"] > 0
    again = penstock(tmp_path, "report", "kept.json").stdout
    printed = run.stderr.splitlines()
    assert set(printed[:-1]) < set(again.splitlines())  # and the settings of each loader
    assert "settings: batch_size=8, num_workers=2" in again
    assert printed[-1].startswith("  report: ")


def test_the_report_is_written_also_when_the_script_fails(tmp_path: Path) -> None:
    path = script(tmp_path, "raise KeyError('label')")
    run = penstock(tmp_path, "run", path.name)
    assert run.returncode == 1
    assert json.loads(written(tmp_path).read_text())["exit"] == {"code": 1, "error": "KeyError: 'label'"}


def test_quiet_says_nothing_of_its_own(tmp_path: Path) -> None:
    run = penstock(tmp_path, "run", "--quiet", script(tmp_path, TRAINING).name)
    assert run.stderr == ""


@pytest.mark.parametrize("command", [("nope.py",), ("-m", "no.such.module"), ()])
def test_nothing_to_run_is_one_line_and_exit_code_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = penstock(tmp_path, "run", *command)
    assert run.returncode == 2
    assert run.stderr.startswith("penstock: ")
    assert run.stderr.count("\n") == 1


def test_tuned_loaders_change_nothing_that_the_script_prints(tmp_path: Path) -> None:
    text = """
        import sys, time, torch
        from torch.utils.data import DataLoader, Dataset

        class Slow(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.tensor(float(index)), index

        torch.manual_seed(0)
        for workers in (0, 2):
            loader = DataLoader(Slow(), batch_size=10, shuffle=True, num_workers=workers)
            for values, labels in loader:
                time.sleep(0.005)
                print(labels.tolist(), float(values.sum()))
        sys.exit(3)
    """
    file = script(tmp_path, text)
    plain = python(tmp_path, str(file))
    tuned = penstock(tmp_path, "run", "--tune", "--quiet", str(file))
    assert (tuned.stdout, tuned.returncode) == (plain.stdout, plain.returncode)
    loaders = json.loads(written(tmp_path).read_text())["loaders"]
    reasons = [loader["statistics"]["workers_reason"] for loader in loaders]
    assert [reason.startswith("auto") for reason in reasons] == [True, True]
    assert [reason.partition("; the script asked for ")[2] for reason in reasons] == ["none", "2"]
    assert all(loader["statistics"]["workers"] >= 1 for loader in loaders)


def test_child_processes_with_loaders_of_their_own_are_counted_in_the_report(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        for _ in range(2):
            if os.fork() == 0:
                list(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4))
                os._exit(0)
            os.wait()
        """,
    )
    done = penstock(tmp_path, "run", "train.py")
    assert done.returncode == 0
    assert "2 child processes of the program used loaders of their own, which were not watched" in done.stderr
