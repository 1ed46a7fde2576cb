"""A run as data (`run.json`), and what is derived from it: figures, comparisons, text, traces."""
