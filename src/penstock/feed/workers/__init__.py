"""Bodies that make batches: the training process itself, threads, and processes."""
