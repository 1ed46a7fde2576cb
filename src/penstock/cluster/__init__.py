"""Workers on the machines of a Ray cluster. Imported only for `worker_type="ray"`."""
