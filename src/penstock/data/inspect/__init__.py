"""Inspection: what a data set holds, and some of its samples.

inspector         opens the data, reads some samples
inspection        the result, as data, as JSON and as lines of text
field_summary     types and statistics of one field
"""

from penstock.data.inspect.field_summary import FieldSummary
from penstock.data.inspect.inspection import Inspection
from penstock.data.inspect.inspector import inspect

__all__ = ["FieldSummary", "Inspection", "inspect"]
