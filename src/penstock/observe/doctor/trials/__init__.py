"""Trials: one loop, run as written and fed from several sources that alternate, so that they can be compared."""
