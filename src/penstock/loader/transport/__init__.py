"""How a batch travels from a worker to the training process: segments, slots, envelopes and channels."""
