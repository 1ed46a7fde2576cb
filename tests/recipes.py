"""The recipes of the site run with the packages that they are for: `make recipes`, in an environment of their own.

It is no part of `make test`: the packages are many, large, and need another torch than the one that is pinned there.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import RECIPES, recipe

_SECTIONS = re.split(r"^## ", RECIPES.read_text(), flags=re.MULTILINE)[1:]
HEADINGS = [section.partition("\n")[0] for section in _SECTIONS if "```python" in section]


def _run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "YOLO_CONFIG_DIR": str(folder)}  # not the settings of whoever runs this
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_recipe_runs(heading: str, tmp_path: Path) -> None:
    program = recipe(heading)
    known = {*sys.stdlib_module_names, "numpy", "penstock", "PIL", "pyarrow", "torch"}
    package = next(name for name in re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE) if name not in known)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "recipe.py").write_text(program)
    _run(tmp_path, "recipe.py")


def test_ultralytics_trains_under_penstock_run_as_under_python(tmp_path: Path) -> None:
    pytest.importorskip("ultralytics")
    (tmp_path / "train.py").write_text(recipe("Ultralytics"))
    losses = []
    for command in (["train.py"], ["-m", "penstock", "run", "train.py"]):
        said = _run(tmp_path, *command)
        with max(tmp_path.rglob("results.csv"), key=os.path.getmtime).open() as file:
            losses.append([[row[name] for name in row if name.startswith("train/")] for row in csv.DictReader(file)])
    assert "iterator: subclass InfiniteDataLoader on penstock's iterator" in said
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
