"""Bytes of local paths and URLs: listing, reading in order and in ranges, retries; copies on a disk in `cache`."""
