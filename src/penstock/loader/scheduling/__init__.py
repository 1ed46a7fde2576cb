"""Which worker gets which batch, how many are under way, and what to do when a worker dies."""
