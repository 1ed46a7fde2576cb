"""Copies of remote files on this machine, shared by its processes and bounded."""
