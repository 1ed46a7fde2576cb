"""Conversion: writes the samples of one data set in another format, in parallel; it resumes after a kill.

scan       the source's schema and counts, if its format does not declare them (records)
write      each part to a folder, which the next attempt keeps (parts); tasks run in processes (workers)
join       parts to files
publish    files are renamed to their final names (target), or uploaded (remote_target)
"""

from penstock.data.convert.conversion import Conversion, Progress, convert

__all__ = ["Conversion", "Progress", "convert"]
