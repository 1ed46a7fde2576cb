"""State of a loader: what `state_dict` returns, and how a pass resumes from it."""
