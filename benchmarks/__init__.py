"""Penstock measured beside torch's DataLoader and the other loaders of the field."""
