"""Ranks that train one model together. The one folder that imports torch.distributed.

- `rank`: this process's rank and the world size.
- `rank_group`: the ranks of one model: votes, sums, broadcasts.
- `collectives`: the collectives inside a sharded model, and completing them with zeros on a rank that failed.
- `rank_news`: messages from one rank to all, in one order, for few requests.
- `failure_alarm`: one rank whose loader fails stops all others.
- `other_sharder`: whether another library shares out samples over ranks.
- `step_counts`: how many more steps each rank of a stream can take, a few at a time.
- `stop_agreement`: all ranks stop at the same step when one gets a signal.
"""
