"""Page-locked slots, and copies to an accelerator ahead of the loop."""
