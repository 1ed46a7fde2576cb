"""What forked children measure that pose as workers: they change nothing in this process, and may be ended."""
