"""Training loops of frameworks, so that they survive out-of-memory. None of them is imported here."""
