"""Bytes of local paths and URLs: listing, reading in order and in ranges, retries, and copies on a disk."""
