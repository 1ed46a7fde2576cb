"""Inspection: what a data set holds, some of its samples, and how fast they can be read here.

look       files, fields, numbers over some samples
speed      reads in order and at random for a while
layout     chunks and compression, where a format has them
picture    images among the samples, as a contact sheet
text       all of it as lines
"""

from penstock.feed.inspect.look import FieldSeen, Inspection, inspect
from penstock.feed.inspect.speed import Speed

__all__ = ["FieldSeen", "Inspection", "Speed", "inspect"]
