"""Data that is stored in chunks: an order that reads each chunk once, and a cache of unpacked ones."""
