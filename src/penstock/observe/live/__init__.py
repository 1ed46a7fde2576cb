"""A run while it runs: snapshots, the terminal panel, status files and Prometheus."""
