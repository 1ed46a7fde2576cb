"""What penstock says of an environment that is not the script's is what to type, and only where it is true."""

from __future__ import annotations

import sys

import pytest

from penstock.launch.isolation import isolation_hint

UVX, PIPX, OWN = "/home/me/.cache/uv/archive-v0/x", "/home/me/.local/share/pipx/venvs/penstock", "/home/me/train/.venv"


def _hint(monkeypatch: pytest.MonkeyPatch, prefix: str, line: str) -> str | None:
    monkeypatch.setattr(sys, "prefix", prefix)
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever the line raises
        exec(line)
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
    assert _hint(monkeypatch, prefix, "raise ValueError('mine')") is None
