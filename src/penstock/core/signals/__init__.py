"""Ctrl-C and the signals that stop a program, where Python alone would lose them."""
