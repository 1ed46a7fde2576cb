"""Conversion: writes the samples of one data set in another format, in parallel; it resumes after a kill.

scan       the source's schema and counts, if its format does not declare them (source_contents)
plan       records are cut into segments (conversion_plan)
write      each segment to a folder, which the next attempt keeps (segment_tasks, partial_folder)
join       segments to files
publish    files are renamed to their final names (target)
"""

from penstock.data.convert.conversion import Conversion
from penstock.data.convert.convert import convert
from penstock.data.convert.progress import Progress

__all__ = ["Conversion", "Progress", "convert"]
