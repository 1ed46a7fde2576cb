"""How a batch is cut, how large its parts may be, and whether that changes the result."""
