"""The road of a batch: storage → sample → batch → slot → the training loop."""
