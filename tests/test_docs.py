"""What the pages say can be typed: their Python runs, their links lead somewhere, and the errors they name occur."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
from page_blocks import run_page
from scripts import run

import penstock
from penstock import cli
from penstock.data.format_registry import FORMATS

ROOT = Path(__file__).parents[1]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "llms.txt", *SITE, *(ROOT / "skills").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
PICTURE = re.compile(r' (?:src|srcset)="([^"]+)"')
GENERATED = runpy.run_path(str(ROOT / "docs/generated.py"))
PAGES_WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]


def _slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file.*train-000:ResourceWarning")  # WebDataset's
@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # torch's own, for an attribute of its StatefulDataLoader
@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own where it uses other projects' loaders, or ranks: they leave threads, files and pipes."""
    if "<!-- needs: " in page.read_text():
        done = run(f"import page_blocks; page_blocks.run_page({str(page)!r})", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        monkeypatch.chdir(tmp_path)
        run_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), (page.name, target)
        assert not anchor or anchor in _slugs(file), (page.name, target, anchor)


def test_every_picture_is_there_and_asks_nobody_for_anything() -> None:
    pictures = {page.parent / name for page in PAGES for name in PICTURE.findall(page.read_text())}
    assert {"logo.svg", "panel-dark.svg", "report-light.png"} <= {picture.name for picture in pictures}
    assert [picture for picture in pictures if not picture.exists()] == []
    for drawn in (ROOT / "docs").rglob("*.svg"):
        assert not re.search(r"""(?:href=|src=|url\()["']?http""", drawn.read_text()), drawn


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text()
    documented = re.findall(r"^\.\. auto\w+:: penstock\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(penstock.__all__) - {"__version__"})


def test_the_reference_has_what_public_classes_inherit_from_penstocks_own() -> None:
    page = (ROOT / "docs/api.md").read_text()
    missing = []
    for name, options in re.findall(r"^\.\. autoclass:: penstock\.(\w+)\n((?:   :.*\n)*)", page, re.MULTILINE):
        if ":inherited-members:" in options or ":show-inheritance:" in options:
            continue
        parents = [one for one in getattr(penstock, name).__mro__[1:] if one.__module__.startswith("penstock.")]
        inherited = {key for one in parents for key in vars(one) if not key.startswith("_")}
        named = re.findall(r"\w+", "".join(re.findall(r":members: (.*)", options)))
        missing += [(name, key) for key in inherited if key not in vars(getattr(penstock, name)) and not named]
    assert missing == []


def test_the_reference_of_a_class_has_only_names_that_it_has() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^\.\. autoclass:: penstock\.(\w+)\n   :members: (.+)$", page, re.MULTILINE)
    assert {"DataLoader", "Source", "Stream"} == {name for name, _ in named}
    assert [
        (name, one) for name, names in named for one in names.split(", ") if not hasattr(getattr(penstock, name), one)
    ] == []
    assert "statistics" in dict(named)["DataLoader"]


def test_the_page_of_commands_has_every_option_of_each() -> None:
    sections = dict(
        re.findall(r"^## penstock (\w+)\n(.*?)(?=^## |\Z)", GENERATED["commands"](), re.MULTILINE | re.DOTALL)
    )
    assert set(sections) == {verb.name for verb in cli.verbs()}
    (verbs,) = (one for one in cli.command_parser()._actions if one.choices)
    for name, parser in verbs.choices.items():
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        assert set(re.findall(r"^\.\. option:: (-[\w-]+)", sections[name], re.MULTILINE)) == options
        assert "%(" not in sections[name]


def test_the_page_of_formats_has_what_every_option_does() -> None:
    text = GENERATED["format_options"]()
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert page.partition(GENERATED["MARK"])[2].strip() == text.strip(), "run: python docs/generated.py"
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [format.name for format in FORMATS]
    for format in FORMATS:
        for function in filter(None, (format.open_files, format.writer)):
            own = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
            assert [
                name for name in own if not re.search(rf"^\| `{name}=.*` \| \S", sections[format.name], re.MULTILINE)
            ] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('penstock.open("train.h5")', "penstock.open"),
        ("TrainStep(model, optimizer, loss_fn)", "penstock.TrainStep"),
        ("loader.state_dict()", "penstock.DataLoader.state_dict"),
        ("penstock run --baseline train.py", "penstock run"),
        ("DataLoader", None),  # torch's as well
        ("open", None),
        ("penstock", None),
        ("num_workers=4", None),
    ],
)
def test_code_in_a_sentence_leads_to_the_reference_if_it_is_penstocks(code: str, name: str | None) -> None:
    assert GENERATED["named_object"](code) == name


def test_the_programs_to_start_from_are_those_of_the_folder() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    shown = re.findall(r"^```{literalinclude} \.\./examples/(\w+)\.py$", page, re.MULTILINE)
    assert re.findall(r"^## (\w+)\.py$", page, re.MULTILINE) == shown
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} - set(shown) == {"make_digits", "small_resnet"}


def test_the_site_has_every_page() -> None:
    listed = set()
    for page in SITE:
        for toctree in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {page.parent / f"{name}.md" for name in re.findall(r"^([\w./-]+)$", toctree, re.MULTILINE)}
    assert set(SITE) - {ROOT / "docs/index.md"} == listed


def test_the_list_of_guides_has_every_guide() -> None:
    guides = ROOT / "docs/guides"
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+\.md)\)", (guides / "index.md").read_text(), re.MULTILINE)
    titles = {page.name: page.read_text().partition("\n")[0] for page in guides.glob("*.md") if page.stem != "index"}
    assert {name: f"# {title}" for title, name in listed} == titles


def test_llms_txt_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(docs/([\w./-]+\.md)\)", (ROOT / "llms.txt").read_text()))
    left_out = {"index.md", "scale.md", "api.md", "articles.zh.md", "how-it-works.md"}
    left_out |= {"changelog.md", "contributing.md", "security.md"}
    assert {page.name for page in SITE if page.parent.name == "docs"} - left_out | {"guides/index.md"} == listed


@pytest.mark.parametrize("name", ["llms.txt", "skills/penstock/SKILL.md", "README.md", "docs/index.md"])
def test_every_name_that_a_page_for_beginners_has_is_public(name: str) -> None:
    page = (ROOT / name).read_text()
    named = set(re.findall(r"(?<![\w/.-])penstock\.(\w+)\b(?!/)", page))
    assert {"TrainStep", "open"} & named
    assert [each for each in named if each not in penstock.__all__] == []
    verbs = set(re.findall(r"`(?:\$ )?penstock ([a-z]+)\b", page))
    assert verbs <= {verb.name for verb in cli.verbs()}
