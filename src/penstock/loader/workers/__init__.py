"""Workers that make batches: processes and threads; the pool of Ray actors is `penstock.cluster`."""
