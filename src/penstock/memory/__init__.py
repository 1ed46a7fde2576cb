"""Keep the training step inside the card. Knows nothing of `penstock.feed`; either is useful alone."""
