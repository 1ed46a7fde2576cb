"""What penstock says of an environment that is not the script's is what to type, and only where it is true."""

from __future__ import annotations

import importlib.metadata
import json
import sys

import pytest
import torch

from penstock.launch.isolation import hidden_torch, isolation_hint

UVX, PIPX, OWN = "/home/me/.cache/uv/archive-v0/x", "/home/me/.local/share/pipx/venvs/penstock", "/home/me/train/.venv"


def _hint(monkeypatch: pytest.MonkeyPatch, prefix: str, line: str) -> str | None:
    monkeypatch.setattr(sys, "prefix", prefix)
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever the line raises
        exec(line, {"torch": torch, "json": json})
    return isolation_hint(caught.value)


@pytest.mark.parametrize(("prefix", "tool"), [(UVX, "uvx"), (PIPX, "pipx run")])
def test_a_package_that_is_missing_is_brought_along_with_the_same_tool(
    monkeypatch: pytest.MonkeyPatch, prefix: str, tool: str
) -> None:
    said = _hint(monkeypatch, prefix, "import timm_or_such.models")
    assert said is not None
    assert f"environment of its own ({prefix})" in said
    assert f"`{tool} --with timm_or_such penstock run`" in said
    assert _hint(monkeypatch, OWN, "import timm_or_such.models") is None


@pytest.mark.parametrize(
    "line",
    [
        "from torch import a_name_of_another_version",
        "torch.nn.a_name_of_another_version",
        "raise RuntimeError('operator torchvision::nms does not exist')",
        "raise ImportError('/x/_C.so: undefined symbol: _ZN3c104cuda14ExchangeDeviceEa')",
        "raise OSError('libcudart.so.12: cannot open shared object file: No such file or directory')",
    ],
)
def test_what_another_torch_causes_is_answered_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    said = _hint(monkeypatch, UVX, line)
    assert said is not None
    assert f"torch {importlib.metadata.version('torch')}. If the script needs another: `uvx --with torch==" in said
    assert _hint(monkeypatch, OWN, line) is None


@pytest.mark.parametrize("line", ["raise ValueError('mine')", "json.no_such_name", "from json import no_such_name"])
def test_an_error_of_the_scripts_own_is_not_laid_to_another_torch(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert _hint(monkeypatch, UVX, line) is None


def test_a_second_torch_of_the_same_version_is_none_that_is_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(sys, "prefix", UVX)
    mine = importlib.metadata.version("torch")
    for other in (mine, "2.1.0+cpu"):
        folder = tmp_path_factory.mktemp("theirs")
        (folder / f"torch-{other}.dist-info").mkdir()
        (folder / f"torch-{other}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {other}\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setattr(sys, "path", [*sys.path[1:], sys.path[0]])
        said = hidden_torch()
        assert (said is None) == (other == mine)
    assert said is not None
    assert f"gets torch {mine}" in said
    assert "its own torch 2.1.0+cpu. To keep that: `--with torch==2.1.0`" in said
    monkeypatch.setattr(sys, "prefix", OWN)
    assert hidden_torch() is None
