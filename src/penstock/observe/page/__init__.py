"""A run as one HTML file: `write_html`. Data first (view.py), then figures (figures.py), then text (html.py)."""

from penstock.observe.page.write import render_html, write_html

__all__ = ["render_html", "write_html"]
