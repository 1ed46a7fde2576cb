"""Inspection: what a data set holds, some of its samples, and how fast it is read here.

inspector         opens the data, reads some samples, measures the speed
inspection        the result, as data, as JSON and as lines of text
field_summary     types and statistics of one field
read_speed        reads in order and at random for a while
"""

from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.inspection import Inspection
from penstock.data.inspect.inspector import inspect
from penstock.data.inspect.read_speed import ReadSpeed

__all__ = ["FieldSummary", "Inspection", "ReadSpeed", "inspect"]
