"""TrainStep and OOMGuard: one optimizer step per window of batches, however often memory runs out."""
