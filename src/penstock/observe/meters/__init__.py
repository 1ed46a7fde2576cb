"""Measurements of the machine and of processes: clocks, memory, devices, copies."""
