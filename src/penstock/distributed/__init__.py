"""Ranks that train one model together. The one folder that imports torch.distributed.

- `peers`: who they are, what they agree on, what they add up.
- `schedule`: the collectives inside of a sharded model, and standing in for one's part of them.
"""
