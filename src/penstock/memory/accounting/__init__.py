"""Which tensors hold which bytes: the ledger, leaks, and releasing memory."""
