"""How a batch crosses from a worker to the training process: slabs, slots, envelopes and channels."""
