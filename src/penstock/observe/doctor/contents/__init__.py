"""Compares samples: their content, the types of their fields, and the sets of samples that loaders draw from."""
