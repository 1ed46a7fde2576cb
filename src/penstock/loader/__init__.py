"""From a dataset to batches: sampling, workers, transport, checkpoints, and copies to a device."""
