"""report.html, a run as one HTML file: data first (view.py), then figures (figures.py), then text (html.py)."""

from penstock.observe.page.write_html import render_html, write_html

__all__ = ["render_html", "write_html"]
