"""Sources: where samples come from. One file per format, its optional package imported there and nowhere else."""
