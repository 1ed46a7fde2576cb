"""Samples that are kept when they were made once: in shared memory, or in a file."""
