"""Sizes in bytes are numbers or text, and anything else is refused with an example."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import OptionError
from penstock.core.units import to_nbytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("2GiB", 2 << 30), ("2 gib", 2 << 30), ("800MB", 800_000_000), (".5KiB", 512), ("7", 7), (2e9, 2 * 10**9)],
)
def test_a_size_is_a_number_or_text(size: Any, nbytes: int) -> None:
    assert to_nbytes("ram", size) == nbytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "1.2.3GiB", "2 Gio", "-1GiB", -1, 0.5, float("nan"), float("inf"), None, [1]]
)
def test_what_is_no_size_is_refused_with_an_example(size: Any) -> None:
    with pytest.raises(OptionError, match=r"ram: .* is not a size; write it as in '24GiB'"):
        to_nbytes("ram", size)
