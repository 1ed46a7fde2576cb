"""Surviving an out-of-memory: undo what a failed attempt changed, free what it held, and do it again."""
