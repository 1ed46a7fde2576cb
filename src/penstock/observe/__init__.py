"""Numbers about a run, turned into words: a live line, a report, and run.json."""
