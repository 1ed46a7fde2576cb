"""The site: `make docs` builds it to build/site, with warnings as errors."""

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from penstock import __version__  # noqa: E402

project = "Penstock"
author = "The Penstock authors"
copyright = "The Penstock authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
default_role = "code"
html_theme = "furo"
html_title = f"Penstock {release}"
html_logo = "logo.svg"
html_favicon = "logo.svg"
html_baseurl = "https://penstock.readthedocs.io/en/latest/"
html_extra_path = ["pictures/social.png"]

SOURCE = "https://github.com/penstock/penstock/blob/main/"
linkcheck_ignore = ["https://github.com/penstock/", html_baseurl, "http://127.0.0.1"]  # the first two: not claimed yet


def link_to_source(_app: object, page: str, source: list[str]) -> None:
    """Point links that leave docs/ at the repository."""
    source[0] = source[0].replace("](" + "../" * (1 + page.count("/")), f"]({SOURCE}")


def add_card(_app: object, page: str, _template: str, context: dict[str, object], _tree: object) -> None:
    """Add what other sites show beside a link to a page."""
    card = {
        "og:title": context.get("title", project),
        "og:image": f"{html_baseurl}social.png",
        "og:url": f"{html_baseurl}{page}.html",
    }
    tags = [f'<meta property="{name}" content="{escape(str(value))}">' for name, value in card.items()]
    context["metatags"] = "\n".join([str(context.get("metatags", "")), *tags])


def setup(app: object) -> None:
    """Register with Sphinx."""
    app.connect("source-read", link_to_source)  # type: ignore[attr-defined]
    app.connect("html-page-context", add_card)  # type: ignore[attr-defined]
