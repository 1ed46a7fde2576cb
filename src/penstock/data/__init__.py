"""Datasets for any DataLoader: what a path holds, as samples. Knows nothing of `penstock.loader`."""
