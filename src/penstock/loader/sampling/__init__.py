"""Which indices a pass has, in what order, and which of them have been handed out."""
