"""The site: `make docs` builds it to build/site, with warnings as errors."""

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

import generated  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

from penstock import __version__  # noqa: E402

project = "Penstock"
author = "The Penstock authors"
copyright = "The Penstock authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["conf.py", "generated.py"]
copybutton_prompt_text = "$ "
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
REPOSITORY = "https://github.com/penstock/penstock/"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}

SOURCE = f"{REPOSITORY}blob/main/"
linkcheck_ignore = ["https://github.com/penstock/", html_baseurl, "http://127.0.0.1"]  # the first two: not claimed yet


def fill_in(_app: object, page: str, source: list[str]) -> None:
    """Put what is made from the code into a page, and point links that leave docs/ at the site or the repository."""
    text, up = source[0], "../" * (1 + page.count("/"))
    if "<!-- commands -->" in text:
        text = text.replace("<!-- commands -->", generated.commands())
    for mark in re.findall(r"<!-- file: (.+) -->", text):  # of the repository's root
        words = (ROOT / mark).read_text(encoding="utf-8")
        words = re.sub(r"\]\((?![a-z]+:|#)(docs/(?=\w))?", lambda found: "](" if found[1] else f"]({up}", words)
        text = text.replace(f"<!-- file: {mark} -->", words)
    programs = "../" * page.count("/") + "examples.md"
    text = re.sub(rf"\]\({re.escape(up)}examples(?:/(\w+)\.py)?\)", rf"]({programs}#\g<1>py)", text).replace(
        "#py)", ")"
    )
    source[0] = text.replace(f"]({up}", f"]({SOURCE}")


def link_code(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Link public names and commands in sentences to the reference, once in each section."""
    objects, linked = app.env.domains["py"].objects, set()
    for code in list(tree.findall(nodes.literal)):
        name = generated.named_object(code.astext())
        if name is None or page == "api" or _is_heading_or_link(code):
            continue
        section = code.parent
        while not isinstance(section, nodes.section | nodes.document):
            section = section.parent
        if page == "commands" and not isinstance(section.parent, nodes.document):
            continue  # of a command itself
        if name in objects:
            target, anchor = objects[name].docname, objects[name].node_id
        elif " " in name:
            target, anchor = "commands", name.replace(" ", "-")
        else:
            continue
        if (name, id(section)) not in linked:
            linked.add((name, id(section)))
            address = f"{app.builder.get_relative_uri(page, target)}#{anchor}"
            code.replace_self(nodes.reference("", "", code.deepcopy(), internal=True, refuri=address))


def _is_heading_or_link(code: nodes.Node) -> bool:
    parent = code.parent
    while parent is not None and not isinstance(parent, nodes.section):
        if isinstance(parent, nodes.reference | nodes.title):
            return True
        parent = parent.parent
    return False


def add_card(_app: object, page: str, _template: str, context: dict[str, object], _tree: object) -> None:
    """Add what other sites show beside a link to a page."""
    card = {
        "og:title": context.get("title", project),
        "og:image": f"{html_baseurl}social.png",
        "og:url": f"{html_baseurl}{page}.html",
    }
    tags = [f'<meta property="{name}" content="{escape(str(value))}">' for name, value in card.items()]
    context["metatags"] = "\n".join([str(context.get("metatags", "")), *tags])


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("doctree-resolved", link_code)
    app.connect("html-page-context", add_card)
