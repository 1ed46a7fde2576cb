"""What the steps of a loop do, observed in a few of them."""
