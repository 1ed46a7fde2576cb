"""Finds the settings with which a loop waits least: change one knob, measure, keep or undo."""
