"""What is published installs, runs with its required packages alone, and says what else to install."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from flit_core import buildapi
from packaging.requirements import Requirement
from scripts import written

import penstock

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
REQUIRED = {"numpy", "rich", "torch"}
OF_CONTRIBUTORS = {"all", "dev", "docs", "examples"}

TRAIN = """
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

for (batch,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=2):
    time.sleep(0.03)
print(len(DataLoader(range(4))))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        buildapi.build_wheel(str(folder))
        buildapi.build_sdist(str(folder))
    return folder


@pytest.fixture(scope="module")
def clean_python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a new environment with the wheel, what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*install, *map(str, dist.glob("*.whl"))], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in _with_requirements(REQUIRED):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())
    return python


def _with_requirements(names: set[str]) -> list[importlib.metadata.Distribution]:
    found, waiting = {}, set(names)
    while waiting:
        name = waiting.pop()
        found[name] = importlib.metadata.distribution(name)
        needs = map(Requirement, found[name].requires or ())
        waiting |= {need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})} - set(
            found
        )
    return list(found.values())


def _run(python: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([str(python), *command], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_script_runs_on_the_wheel_and_the_required_packages_alone(clean_python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = clean_python.with_name("penstock")
    done = _run(clean_python, tmp_path, str(command), "run", "train.py")
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert "samples" in done.stderr
    assert "Loaders" in written(tmp_path, "report.html").read_text()
    assert written(tmp_path).exists()


def test_what_the_required_packages_do_not_bring_is_named(clean_python: Path, tmp_path: Path) -> None:
    code = """
from penstock import DataLoader, ExtraError, __file__, open
assert "site-packages" in __file__
assert [batch.tolist() for batch in DataLoader(range(4), batch_size=2)] == [[0, 1], [2, 3]]
import pathlib
pathlib.Path("a.h5").write_bytes(b"\\x89HDF\\r\\n\\x1a\\n" + bytes(100))
try:
    open("a.h5")
except ExtraError as error:
    print(error)
"""
    done = _run(clean_python, tmp_path, "-c", code)
    assert 'h5py is needed and not installed: pip install "penstock[hdf5]"' in done.stdout, done.stderr


def test_the_wheel_is_small_and_says_that_it_has_types(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert "penstock/py.typed" in names
    assert {"page.css", "page.js"} <= {Path(name).name for name in names}
    assert [name for name in names if not name.startswith(("penstock/", f"penstock-{penstock.__version__}."))] == []


def test_the_source_distribution_has_what_is_needed_to_build_the_wheel_again(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    build = f"from flit_core import buildapi; buildapi.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True)
    (wheel,), (again,) = dist.glob("*.whl"), tmp_path.glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
    assert (folder / "CHANGELOG.md").exists()


def test_what_the_index_shows_has_absolute_links_to_files_that_exist() -> None:
    functions = runpy.run_path(str(ROOT / ".ci/absolute_links.py"))
    bases = (functions["PAGES"], functions["FILES"])
    assert bases[0].startswith(PROJECT["urls"]["Source"])
    page = functions["with_absolute_links"]((ROOT / "README.md").read_text())
    targets = re.findall(r"\]\(([^)]+)\)", page) + re.findall(r'(?:src|srcset)="([^"]+)"', page)
    assert [target for target in targets if "://" not in target] == []
    ours = [target for target in targets if target.startswith(bases)]
    assert len(ours) > 20
    for target in ours:
        path = target.removeprefix(bases[0]).removeprefix(bases[1]).partition("#")[0]
        assert (ROOT / path).exists(), target


def test_the_index_would_take_both(dist: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    for tool, checked in ((("twine", "check", "--strict"), files), (("check_wheel_contents",), files[:1])):
        done = subprocess.run([sys.executable, "-m", *tool, *checked], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_all_is_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == set(extras) - OF_CONTRIBUTORS
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == REQUIRED


def test_every_extra_that_an_error_names_exists() -> None:
    named = set()
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        named |= set(re.findall(r"penstock\[(\w+)\]", text)) | set(re.findall(r"need\([^)]*, \"(\w+)\"\)", text))
    assert named - {"extra"} <= set(PROJECT["optional-dependencies"])
    assert {"gpu", "hdf5", "prometheus"} <= named


def test_the_conda_recipe_requires_what_the_wheel_does() -> None:
    recipe = (ROOT / "conda/recipe.yaml").read_text()
    assert re.findall(r"^  version: (\S+)$", recipe, re.MULTILINE) == [f'"{penstock.__version__}"']
    for step, required in (
        ("run", {*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"}),
        ("host", {*BUILD["requires"], "pip", f"python{PROJECT['requires-python']}"}),
    ):
        named = re.search(rf"^  {step}:\n((?:    - .+\n)+)", recipe, re.MULTILINE)
        assert named is not None
        on_pypi = named[1].replace("pytorch", "torch").replace("flit-core", "flit_core").replace(" ", "")
        assert {line.removeprefix("-") for line in on_pypi.splitlines()} == required
    (command,) = PROJECT["scripts"].items()
    assert f"- {' = '.join(command)}\n" in recipe
    for key, value in (("summary", PROJECT["description"]), ("license", PROJECT["license"])):
        assert f"\n  {key}: {value}\n" in recipe
    for key, name in (("homepage", "Source"), ("documentation", "Documentation")):
        assert f"\n  {key}: {PROJECT['urls'][name]}\n" in recipe


def test_rattler_build_renders_the_conda_recipe() -> None:
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "conda/recipe.yaml")
    (rendered,) = recipe.render(rattler_build.VariantConfig(), rattler_build.RenderConfig())
    assert rendered.recipe.to_dict()["package"] == {"name": "penstock", "version": penstock.__version__}
    assert rendered.recipe.to_dict()["build"]["noarch"] == "python"
