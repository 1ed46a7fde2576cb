"""Which variants of a training step fit the memory, predicted and measured."""
