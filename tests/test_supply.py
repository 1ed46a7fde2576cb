"""What CI runs is pinned: packages by hashes, actions by commits, and each package comes from one index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ; [^\\\n]+)?((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def pins(name: str) -> dict[str, tuple[str, int]]:
    """Return the versions of a file's packages, and how many hashes each has."""
    found = PIN.findall((ROOT / name).read_text())
    return {re.sub(r"[-_.]+", "-", pin[0]).lower(): (pin[1], pin[2].count("--hash")) for pin in found}


def test_ci_installs_the_versions_of_constraints_txt_with_hashes() -> None:
    hashed, constraints = pins(".ci/constraints.hashed.txt"), pins("constraints.txt")
    del constraints["torch"]  # `.ci/install` takes it from PyTorch's own index
    assert {name: version for name, (version, _) in hashed.items()} == {
        name: version for name, (version, _) in constraints.items()
    }, "run `make lock`"
    for name in ("constraints", "conda"):
        text = (ROOT / f".ci/{name}.hashed.txt").read_text()
        found = pins(f".ci/{name}.hashed.txt")
        assert all(hashes for _, hashes in found.values())
        assert len(found) == len([line for line in text.splitlines() if line[:1].isalnum()]) > 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_actions_by_commit_and_packages_by_hash(workflow: Path) -> None:
    text = workflow.read_text()
    actions = re.findall(r"uses: *(\S+)(.*)", text)
    assert actions != []
    for action, comment in actions:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)  # dependabot reads it
    assert "EXTRA_INDEX_URL" not in text
    assert "make setup" not in text
    assert all("--require-hashes" in line for line in text.splitlines() if "pip install" in line)


def test_what_ci_installs_comes_from_one_index_each() -> None:
    lines = [line for line in (ROOT / ".ci" / "install").read_text().splitlines() if line.startswith("install -")]
    assert len(lines) == 4
    for line in lines:
        assert "extra-index" not in line
        assert ("--require-hashes" in line) != ("--index-url" in line or "-e ." in line)


def test_each_test_that_security_md_names_exists() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("| promise | test |")[2].partition("\n## ")[0]
    modules = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    rows = [row for row in table.splitlines()[2:] if row]
    assert len(rows) > 20
    for row in rows:
        tests = row.split(" | ")[-1]
        names, paths = re.findall(r"`(test_\w+)`", tests), re.findall(r"`(tests/[\w/.]+)`", tests)
        assert names or paths, row
        for name in names:
            assert any(f"def {name}(" in text for text in modules.values()), name
        assert all((ROOT / path).exists() for path in paths), row
