"""Words and turns of phrase that made pages hard to read do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

INSTEAD = {
    r"\bbeside\b": "next to, in addition to, compared with",
    r"\bdear(er)?\b": "expensive, slow",
    r"\b(is|are) (said|told|named|noted|warned of|honoured|taken for)\b": "penstock warns, the error names",
    r"\b(is|are) refused\b": "penstock raises an error, refuses",
    r"\b(is|are) (proven|proved)\b": "tests check",
    r", which (is tested|a test|tests)\b": "a sentence of its own, or nothing",
    r"\b(is|are) no (\w+ file|part)\b": "is not a",
    r"\b(has|have) not[,.;:]": "doesn't have",
    r"\b(stands?|lies?)\b": "is, is stored",
    r"\bwhat is missing\b": "the missing package, field ...",
    r"\bwhat (\w+ ){0,3}costs?\b": "how long it takes, how much memory it needs",
    r"\bin the place of\b": "instead of",
    r"\bis there already\b": "is ready, is in memory",
    r"\bshar(e|es|ed|ing) out\b": "shard, distribute",
    r"\bcosts? what\b": "takes as long as",
    r"\bone behind the other\b": "one after another",
    r"\bwith what to change\b": "and says what to change",
    r"\bwithout being told\b": "by itself",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
}
"""Patterns, whatever their case, and what to write. The list may grow."""

NOT_YET = {"docs/formats.md"}
"""Pages that have not been rewritten. The list may only shrink."""


def _prose(page: Path) -> str:
    """Return the text of a page without code, comments, and tables and lists that are made from results or code."""
    text = re.sub(r"<!-- bench: .*?<!-- bench:end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text.partition("<!-- formats: ")[0], flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"`[^`\n]*`", "CODE", text).split())


def _found(page: Path) -> list[str]:
    prose = _prose(page)
    return [
        f"... {prose[max(0, one.start() - 30) : one.end() + 30]} ...: write {better}"
        for pattern, better in INSTEAD.items()
        for one in re.finditer(pattern, prose, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_it_in_plain_english(page: Path) -> None:
    found = _found(page)
    if str(page.relative_to(ROOT)) not in NOT_YET:
        assert found == []
    else:
        assert found, f"{page.name} is rewritten: take it out of NOT_YET"
