"""Imports what every worker needs, in the fork server that workers are forked from.

Python's garbage collector passes over all objects again and again while torch is imported, and finds nothing: a third
of the time. So it does not run meanwhile; and after that it leaves what was imported alone, whose memory the forked
workers then go on sharing.
"""

from __future__ import annotations

import gc
import importlib

gc.disable()
try:
    importlib.import_module("penstock.loader.workers.process_main")
finally:
    gc.freeze()
    gc.enable()
