"""A package that is run with python -m."""

NAME = __name__
