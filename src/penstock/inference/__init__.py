"""`penstock.infer`: a model over the batches of a loader, or of a live source."""
