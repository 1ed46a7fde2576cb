"""Conversion: the samples of one data set, written in another format, in parallel and resumable after a kill.

look       the source's schema and counts, where its format does not say them
plan       records are cut into segments
write      each segment to a file of its own, journaled
join       segments to files
publish    files to their names
"""

from penstock.feed.convert.progress import Progress
from penstock.feed.convert.run import convert
from penstock.feed.convert.work import Conversion

__all__ = ["Conversion", "Progress", "convert"]
