"""Measurements of one loop's parts. Each file measures one thing and changes nothing."""
