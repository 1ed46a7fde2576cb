"""Micro-batches: how a batch is cut, how large its parts may be, and how many samples have room now."""
