"""Which datasets of an HDF5 file are the fields of its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.core.errors import SourceError
from penstock.data.formats.array_columns import RAGGED, of_one_length, readable
from penstock.data.formats.column_source import Column
from penstock.data.optional import need
from penstock.data.schema import Selection

Describe = Callable[[str, Any], dict[str, Column | str]]
"""Given a name and h5py's dataset (or group of ragged arrays), returns the fields that it is, or why it is none."""

_MAX_OBJECTS = 10_000
_NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


def select_columns(group: Any, fields: Selection, describe: Describe, *, external: bool) -> dict[str, Column]:
    """Return the fields of samples, by their names in samples.

    Args:
        group: h5py's, in whose datasets they lie.
        fields: which are wanted; by default the datasets that have as many rows as the largest one.
        describe: is given each dataset.
        external: whether links to other files are followed.

    Warns of what no field can hold, and is left out as nobody asked for it by name.

    Raises:
        SourceError: there are none, one is not there or cannot be held, they differ in length, or it is not clear which
            are meant.
    """
    if fields.chosen is None:
        found = _all_columns(_list_datasets(group, external), _where(group), describe)
    else:
        found = {name: _find_column(group, own, describe, external) for name, own in fields.chosen}
    columns = readable(found, _where(group))
    if not columns:
        links = (group.get(name, getlink=True) for name in group)
        others = [link.filename for link in links if isinstance(link, need("h5py", "hdf5").ExternalLink)]
        hint = f", but links to {others[0]!r}; pass external=True if it may name files to read" if others else ""
        raise SourceError(f"{_where(group)} has no datasets with rows{hint}")
    return columns


def _all_columns(there: dict[str, Any], where: str, describe: Describe) -> dict[str, Column | str]:
    columns: dict[str, Column | str] = {}
    while there and all(isinstance(column, str) for column in columns.values()):
        same = of_one_length(there, _nbytes, where, "choose with fields= or group=")
        for name, one in same.items():
            columns |= describe(name, one)
        there = {name: one for name, one in there.items() if name not in same}
    return columns


def _where(group: Any) -> str:
    return f"{group.file.filename}, group {group.name!r}" if group.name != "/" else str(group.file.filename)


def _find_column(group: Any, name: str, describe: Describe, external: bool) -> Column:
    head, found = name, _dataset(group, name)
    while found is None and "/" in head:  # a part of a compound type
        head = head.rpartition("/")[0]
        found = _dataset(group, head)
    columns = {} if found is None else describe(head, found)
    if name in columns:
        column = columns[name]
        if isinstance(column, str):
            raise SourceError(f"{column}; choose other fields with fields=")
        return column
    known = columns or _list_datasets(group, external)
    raise SourceError(
        f"{_where(group)} has no field {name!r}; it has {', '.join(map(repr, list(known)[:50])) or 'none'}"
    )


def _dataset(group: Any, name: str) -> Any:
    h5py = need("h5py", "hdf5")
    found = group.get(name)
    if isinstance(found, h5py.Dataset):
        return found if found.shape else None
    return found if isinstance(found, h5py.Group) and RAGGED in found.attrs else None


def _list_datasets(group: Any, external: bool) -> dict[str, Any]:
    """Return the datasets that have rows, and the groups of ragged arrays, by their paths in the group.

    Group by group: the library's own walk, `visititems`, crashes on some files that are corrupt (HDF5 2.0.0).
    """
    h5py = need("h5py", "hdf5")
    found: dict[str, Any] = {}
    seen = 0
    followed = (h5py.HardLink, h5py.ExternalLink) if external else (h5py.HardLink,)
    groups = [("", group)]
    for prefix, here in groups:
        for name in here:
            seen += 1
            if seen > _MAX_OBJECTS:  # or a link that leads back
                raise SourceError(f"{_where(group)} has more than {_MAX_OBJECTS} objects; choose some with fields=")
            if name.startswith("_i_") or not isinstance(here.get(name, getlink=True), followed):
                continue  # PyTables names indexes of its tables so
            one = here[name]
            if isinstance(one, h5py.Group) and RAGGED not in one.attrs:
                groups.append((f"{prefix}{name}/", one))
            elif isinstance(one, h5py.Group) or (
                isinstance(one, h5py.Dataset) and one.shape and not _is_dimension(one)
            ):
                found[prefix + name] = one
    return found


def _is_dimension(dataset: Any) -> bool:
    """Whether it only says how long a dimension of netCDF is: without values, and the length of its name may vary."""
    name = dataset.attrs.get("NAME", b"") if dataset.attrs.get("CLASS") == b"DIMENSION_SCALE" else b""
    return isinstance(name, bytes) and name.startswith(_NO_VARIABLE)


def _nbytes(dataset: Any) -> int:
    return int(dataset.size) * int(dataset.id.get_type().get_size())  # NumPy may have no such type
