"""Workers that make batches: processes, threads, and Ray actors."""
