"""Makes the page and writes it."""

from __future__ import annotations

from pathlib import Path

from penstock.observe.compare import Comparison
from penstock.observe.page.figures import figures
from penstock.observe.page.html import html_of
from penstock.observe.page.view import view_of
from penstock.observe.record import RunRecord
from penstock.observe.whole_file import write_whole


def render_html(record: RunRecord, against: Comparison | None = None) -> str:
    """Return the run as one HTML page that asks the network for nothing.

    Example:
        >>> page = render_html(RunRecord(command=("train.py",), started="2026-01-01T00:00:00+00:00", wall_s=1.0))
        >>> "No batch was loaded" in page
        True
    """
    view = view_of(record, against)
    return html_of(view, figures(view.course))


def write_html(record: RunRecord, file: Path, against: Comparison | None = None) -> None:
    """Write the page of `record`, compared with `against`, to `file`, whole or not at all.

    Raises:
        OptionError: it cannot be written there.
    """
    write_whole(file, render_html(record, against), "--html FILE")
