"""The folders show the architecture: few modules in each, one meaning for a file's name, privates stay at home."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
MOST_MODULES = 20

SAME_ROLE = {"source", "writer", "fields"}
"""Names that every format's folder may have, for the file with that role."""


def test_no_folder_holds_more_than_twenty_modules() -> None:
    counted = Counter(path.parent.relative_to(ROOT) for path in MODULES)
    assert {str(folder): count for folder, count in counted.items() if count > MOST_MODULES} == {}


def test_a_file_name_stands_for_one_thing() -> None:
    verbs = {path.stem for path in (ROOT / "cli").glob("*.py")}  # a verb's file is named after what it runs
    named = Counter(path.stem for path in MODULES if path.parent.name != "cli")
    twice = {name for name, count in named.items() if count > 1} - SAME_ROLE
    assert twice == set()
    assert {path.stem for path in MODULES if path.stem in SAME_ROLE and "formats" not in path.parts} == {
        "source",  # data/source.py holds the class that those of this role derive from
    }
    assert verbs & set(named) <= {"run"}


def test_no_module_touches_what_is_private_in_another() -> None:
    trees = {path: ast.parse(path.read_text()) for path in MODULES}
    home: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in _private_names(tree):
            home[name].add(path)
    touched = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in home and path not in home[node.attr]
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if node.attr not in NOT_OURS
    ]
    assert touched == []


NOT_OURS = {
    "_base",
    "_buffers",
    "_endpoint",
    "_index_sampler",
    "_indices",
    "_registry",
    "_schema",
    "_shutdown_workers",
    "_values",
    "_version",
}
"""Attributes of torch's, botocore's and Python's objects that some class of ours has under the same name."""


def _private_names(tree: ast.Module) -> set[str]:
    """Return the private methods, classes and attributes that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}
