"""Keep the training step inside the card. Knows nothing of `penstock.loader`; either is useful alone."""
