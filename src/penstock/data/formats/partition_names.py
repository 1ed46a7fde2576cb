"""Names of Hive partitions: columns that are in the names of folders, as in year=2026/a.csv, and not in the files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote

from penstock.core.errors import SourceError
from penstock.data.schema import Selection


def partition_values(path: str) -> dict[str, str]:
    """Return the columns that the names of a file's folders state.

    >>> partition_values("s3://bucket/year=2026/label=hot%20dog/a=1.parquet")
    {'year': '2026', 'label': 'hot dog'}
    >>> partition_values("https://host/label%3Dhot%2520dog/a.parquet")  # names are quoted once more in a URL
    {'label': 'hot dog'}
    """
    names = path.split("/")[:-1]
    pairs = (name.partition("=") for name in (map(unquote, names) if path.startswith("http") else names))
    return {unquote(key): unquote(value) for key, equals, value in pairs if key and equals}


def check_left_out(paths: Sequence[str], columns: Callable[[], Iterable[str]], fields: Selection, remedy: str) -> None:
    """Warn of partitions that tell files apart and are no field.

    Args:
        paths: of the files.
        columns: returns those of the files, and those asked for.
        fields: which are read.
        remedy: what to do to have the partitions {}.

    Raises:
        SourceError: such a partition is among the fields that are asked for.
    """
    stated = [partition_values(path) for path in dict.fromkeys(path.rpartition("/")[0] + "/" for path in paths)]
    names = dict.fromkeys(name for one in stated for name in one)
    varying = [name for name in names if len({one.get(name) for one in stated}) > 1]
    known = {*columns()} if varying else set()
    left_out = [name for name in varying if name not in known]
    if not left_out:
        return
    what = f"the folders of {paths[0]} and others state {', '.join(map(repr, left_out))}, which the files do not hold"
    if fields.chosen is None:
        warnings.warn(f"left out: {what}; {remedy.format(left_out)}, or pass fields= to do without it", stacklevel=2)
    elif wanted := [name for _, name in fields.chosen if name in left_out]:
        raise SourceError(f"there is no field {wanted[0]!r}: {what}; {remedy.format(wanted)}")
