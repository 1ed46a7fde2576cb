"""File formats, a folder each: what reads a format, what writes it, and the `Format` that names both."""
