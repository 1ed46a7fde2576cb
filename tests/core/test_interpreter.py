"""No process that penstock starts takes a module from the current folder, which may hold a stranger's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.interpreter import arguments_of

RUN = "with open({!r}, 'a') as ran:\n    ran.write(__name__ + ' ')\nraise SystemExit(9)\n"
COMMAND = "import sys\nfrom penstock.cli import main\nsys.exit(main())\n"


class Folder:
    """A folder with a module for each of the standard library's, which leaves its name when it runs."""

    def __init__(self, where: Path, without: set[str]) -> None:
        self.path, self._ran = where / "strangers", where / "ran"
        self.path.mkdir()
        for name in sys.stdlib_module_names - {*sys.builtin_module_names} - without:
            (self.path / f"{name}.py").write_text(RUN.format(str(self._ran)))

    def ran(self) -> str:
        """Return the modules that have run."""
        return self._ran.read_text() if self._ran.exists() else ""


@pytest.fixture
def strangers(tmp_path: Path) -> Folder:
    return Folder(tmp_path, set())


def command(folder: Folder, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock`, which lies elsewhere, in a folder."""
    file = folder.path.parent / "bin" / "command.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(COMMAND)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(file), *words], cwd=folder.path, env=own, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_strangers_modules_would_run_in_their_folder(strangers: Folder) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=strangers.path, check=False)
    assert strangers.ran().split() != []


def test_an_interpreter_has_the_path_that_it_is_told_before_it_imports_anything(strangers: Folder) -> None:
    path = [folder for folder in sys.path if folder]
    code = "import json, signal, socket; print(json.dumps([sys.path, sys.argv[1:], sys.flags.safe_path]))"
    start = [sys.executable, *arguments_of(code, "an argument", path=path)]
    done = subprocess.run(start, cwd=strangers.path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [path, ["an argument"], bool(sys.flags.safe_path)]
    assert strangers.ran() == ""


@pytest.mark.slow
def test_the_workers_of_a_conversion_import_nothing_from_the_current_folder(strangers: Folder) -> None:
    (strangers.path / "in.jsonl").write_text("".join(f'{{"x": {number}}}\n' for number in range(40)))
    command(strangers, "convert", "in.jsonl", "out.jsonl", "--workers", "2", "--quiet")
    assert (strangers.path / "out.jsonl").read_text().count("\n") == 40
    assert strangers.ran() == ""


@pytest.mark.slow
def test_a_baseline_run_gives_the_program_the_path_of_python_and_imports_nothing_else(strangers: Folder) -> None:
    program = strangers.path.parent / "programs" / "train.py"
    program.parent.mkdir()
    program.write_text("import sys\nwith open(sys.argv[1], 'a') as seen:\n    print(sys.path, file=seen)\n")
    seen = strangers.path.parent / "seen"
    command(strangers, "run", "--quiet", "--baseline", str(program), str(seen))
    subprocess.run([sys.executable, str(program), str(seen)], cwd=strangers.path, check=True)
    by_torch, by_penstock, by_python = seen.read_text().splitlines()
    assert by_torch == by_penstock == by_python
    assert strangers.ran() == ""


@pytest.mark.slow
def test_python_m_penstock_leaves_the_current_folder_out_but_for_a_program_of_its_own(tmp_path: Path) -> None:
    show = "import runpy, sys; print(*sys.modules)"  # what Python imports for -m, before penstock can do anything
    pythons = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, capture_output=True, text=True, check=True)
    folder = Folder(tmp_path, {*pythons.stdout.split()})
    (folder.path / "in.jsonl").write_text('{"x": 1}\n')
    for words in (["inspect", "in.jsonl"], ["convert", "in.jsonl", "out.jsonl", "--workers", "0"]):
        start = [sys.executable, "-m", "penstock", *words]
        done = subprocess.run(start, cwd=folder.path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert folder.ran() == ""
    (tmp_path / "mine.py").write_text("print('this one is')\n")
    own = [sys.executable, "-m", "penstock", "run", "--quiet", "-m", "mine"]
    assert "this one is" in subprocess.run(own, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout
