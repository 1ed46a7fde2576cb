"""Renders report.html and writes it to a file."""

from __future__ import annotations

from pathlib import Path

from penstock.observe.atomic_write import write_text_atomic
from penstock.observe.record.run_record import RunRecord
from penstock.observe.report.figures import figures
from penstock.observe.report.html import page_html
from penstock.observe.report.view import build_view


def render_html(record: RunRecord) -> str:
    """Return the run as one HTML page that makes no network request.

    Example:
        >>> page = render_html(RunRecord(command=("train.py",), started="2026-01-01T00:00:00+00:00", wall_s=1.0))
        >>> "loaded no batch through a DataLoader" in page
        True
    """
    view = build_view(record)
    return page_html(view, figures(record, view.series))


def write_html(record: RunRecord, file: Path) -> None:
    """Write the page of `record` to `file`, atomically.

    Raises:
        OptionError: the file cannot be written.
    """
    write_text_atomic(file, render_html(record), "--html FILE")
