"""Which datasets of an HDF5 file are the fields of its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.core.errors import SourceError
from penstock.data.formats.array_columns import RAGGED, readable
from penstock.data.formats.column_source import Column
from penstock.data.optional import need
from penstock.data.schema import Selection

Describe = Callable[[str, Any], dict[str, Column | str]]
"""Given a name and h5py's dataset (or group of ragged arrays), returns the fields that it is, or why it is none."""

_MAX_OBJECTS = 10_000
_NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"


class _Listed(NamedTuple):
    """What lies in a group, by paths in it."""

    datasets: dict[str, Any]
    """Those with rows, and groups of ragged arrays."""

    dangling: dict[str, str]
    """Links that lead nowhere, and why they do."""

    outside: dict[str, str]
    """Links that were not followed, and the file to which each leads."""


def select_columns(group: Any, fields: Selection, describe: Describe, *, external: bool) -> dict[str, Column]:
    """Return the fields of samples, by their names in samples.

    Args:
        group: h5py's, in whose datasets they lie.
        fields: which are wanted; by default all datasets.
        describe: is given each dataset.
        external: whether links to other files are followed.

    Warns of what no field can hold, and is left out as nobody asked for it by name.

    Raises:
        SourceError: there are none, one is not there or cannot be held, they differ in length, it is not clear which
            are meant, or one is a link to another file, without `external`.
    """
    if fields.chosen is None:
        found = _all_columns(_list_datasets(group, external), _where(group), describe)
    else:
        found = {name: _find_column(group, own, describe, external) for name, own in fields.chosen}
    columns = readable(found, _where(group))
    if not columns:
        raise SourceError(f"{_where(group)} has no datasets with rows")
    return columns


def _all_columns(listed: _Listed, where: str, describe: Describe) -> dict[str, Column | str]:
    if listed.outside:
        name, file = next(iter(listed.outside.items()))
        raise SourceError(
            f"{where}: the values of {name!r} lie in {file!r}, to which it links; pass external=True if this file may "
            "name files to read, or choose other fields with fields="
        )
    columns: dict[str, Column | str] = {name: f"{where}: {why}" for name, why in listed.dangling.items()}
    for name, one in listed.datasets.items():
        columns |= describe(name, one)
    return columns


def _where(group: Any) -> str:
    return f"{group.file.filename}, group {group.name!r}" if group.name != "/" else str(group.file.filename)


def _find_column(group: Any, name: str, describe: Describe, external: bool) -> Column:
    head, found = name, _dataset(group, name)
    while found is None and "/" in head:  # a part of a compound type
        head = head.rpartition("/")[0]
        found = _dataset(group, head)
    columns = {} if found is None else describe(head, found)
    column = columns.get(name, columns.get(head))
    if column is not None and (name in columns or isinstance(column, str)):
        if isinstance(column, str):
            raise SourceError(f"{column}; choose other fields with fields=")
        return column
    known = columns or _list_datasets(group, external).datasets
    raise SourceError(
        f"{_where(group)} has no field {name!r}; it has {', '.join(map(repr, list(known)[:50])) or 'none'}"
    )


def _dataset(group: Any, name: str) -> Any:
    h5py = need("h5py", "hdf5")
    found = group.get(name)
    if isinstance(found, h5py.Dataset):
        return found if found.shape else None
    return found if isinstance(found, h5py.Group) and RAGGED in found.attrs else None


def _list_datasets(group: Any, external: bool) -> _Listed:
    """List a group and those within it, and follow links: each name is one more, also where two are of one dataset.

    Group by group: the library's own walk, `visititems`, crashes on some files that are corrupt (HDF5 2.0.0), and
    follows no soft links.
    """
    h5py = need("h5py", "hdf5")
    listed = _Listed({}, {}, {})
    seen = 0
    groups: list[tuple[str, tuple[Any, ...]]] = [("", (group,))]
    for prefix, way in groups:
        for name in way[-1]:
            seen += 1
            if seen > _MAX_OBJECTS:
                raise SourceError(f"{_where(group)} has more than {_MAX_OBJECTS} objects; choose some with fields=")
            one = _linked(way[-1], name, prefix + name, listed, external)
            if isinstance(one, h5py.Group) and RAGGED not in one.attrs:
                if one not in way and not _is_index(one, name):  # a group within itself has nothing new
                    groups.append((f"{prefix}{name}/", (*way, one)))
            elif isinstance(one, h5py.Group) or (
                isinstance(one, h5py.Dataset) and one.shape and not _is_dimension(one)
            ):
                listed.datasets[prefix + name] = one
    return listed


def _linked(here: Any, name: str, path: str, listed: _Listed, external: bool) -> Any:
    """Return what a name of a group links to, or None, and list why."""
    h5py = need("h5py", "hdf5")
    link = here.get(name, getlink=True)
    if isinstance(link, h5py.HardLink):
        return here[name]
    try:
        one = here[name] if external else _follow(here, name)
    except (KeyError, RuntimeError) as error:
        if isinstance(link, h5py.ExternalLink):
            words = f"{path!r} is a link to {link.path!r} of {link.filename!r}, which cannot be opened; pass fields="
            raise SourceError(f"{_where(here)}: {words} without it, if it is not needed") from error
        listed.dangling[path] = f"{path!r} is a link to {link.path!r}, where nothing is"
        return None
    if isinstance(one, str):
        listed.outside[path] = one
        return None
    return one


def _follow(here: Any, path: str, most_links: int = 16) -> Any:
    """Return what lies at a path, by way of soft links; the name of the other file to which it leads, not opened.

    Raises:
        KeyError: there is nothing.
        RuntimeError: there are more links on the way than the HDF5 library follows, as in a circle.
    """
    h5py = need("h5py", "hdf5")
    if most_links < 0:
        raise RuntimeError("too many links")
    here = here.file["/"] if path.startswith("/") else here
    for part in path.split("/"):
        if part in ("", "."):
            continue
        link = here.get(part, getlink=True) if isinstance(here, h5py.Group) else None
        if link is None:
            raise KeyError(part)
        if isinstance(link, h5py.ExternalLink):
            return link.filename
        here = _follow(here, link.path, most_links - 1) if isinstance(link, h5py.SoftLink) else here[part]
        if isinstance(here, str):
            return here
    return here


def _is_index(group: Any, name: str) -> bool:
    """Whether it is PyTables' of a table's columns."""
    return name.startswith("_i_") and bool(_fixed(group, "CLASS") == b"TINDEX")


def _is_dimension(dataset: Any) -> bool:
    """Whether it only says how long a dimension of netCDF is: without values, and the length of its name may vary."""
    return _fixed(dataset, "CLASS") == b"DIMENSION_SCALE" and _fixed(dataset, "NAME").startswith(_NO_VARIABLE)


def _fixed(one: Any, name: str) -> bytes:
    """Return text of fixed length that an object states of itself; of other types it is not read."""
    there = name in one.attrs and one.attrs.get_id(name).dtype.kind == "S"
    value = one.attrs[name] if there else b""
    return value if isinstance(value, bytes) else b""
