"""A run that is over, as a person reads it: text_report for the terminal, and report.html.

Data first (headline.py, view.py), then text (text_report.py) or figures and HTML (figures.py, html.py).
"""
