"""Where the values lie in a tf.train.Example of the usual layout: what `example` does, and faster.

The usual layout is one Features message with nothing after it, whose entries are a name and a feature of one list,
which is packed or a single string of bytes. The lengths and tags between the values determine the layout, and in
records of one length these mostly are the same bytes at the same places. So the places found in one record are valid
for the next one if some dozens of bytes are equal, or for many at once. Any other record is left to `example`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.data.formats.tfrecord.example import Values, parse_int64s
from penstock.data.formats.tfrecord.protobuf_wire import floats, int64_rows, usual_inside, usual_span

_MOST_KNOWN = 64
"""Lengths of records that are remembered."""
_MOST_FEATURES = 1 << 16
"""Of what counts as the usual layout."""
_TAKEN_OF_EACH = 32
"""What parsing takes of each byte that is not within a string or packed floats, of tiny values: 29 were seen."""

_FIRST = 0x0A
_SECOND = 0x12


def _bytes(data: bytes, begin: int, end: int) -> Values:
    return [data[begin:end]]


_VALUES: dict[int, Callable[[bytes, int, int], Values]] = {0x0A: _bytes, 0x12: floats, 0x1A: parse_int64s}
"""By the tag of the list in a feature."""

_Place = tuple[str, Callable[[bytes, int, int], Values], int, int]
"""A feature's name, how to read its values, and where they begin and end."""


@dataclass(frozen=True, slots=True)
class _Known:
    """How records of one length are laid out."""

    between: tuple[tuple[bytes, int], ...]
    """The bytes between values, and where they begin."""

    places: tuple[_Place, ...]
    """Of the features that are wanted."""

    def fits(self, record: bytes) -> bool:
        """Say whether another record of this length is laid out so, too."""
        for bytes_, begin in self.between:  # noqa: SIM110 - a generator would take longer than the comparisons
            if not record.startswith(bytes_, begin):
                return False
        return True


class ExampleFastPath:
    """Parses Examples that are like each other: the features that are wanted, or all. For any number of threads.

    >>> from penstock.data.formats.tfrecord.example import serialize_example
    >>> places = ExampleFastPath()
    >>> [places.parse_usual(serialize_example({"label": [label]})) for label in (7, 8)]
    [{'label': [7]}, {'label': [8]}]
    """

    def __init__(self, wanted: Container[str] | None = None) -> None:
        self._wanted = wanted
        self._known: dict[int, _Known] = {}

    def parse_usual(self, record: bytes) -> dict[str, Values] | None:
        """Return the features, as `example.parse_features` does; None where the layout is not the usual one.

        Such a record is an Example, and no SequenceExample.
        """
        known = self._known.get(len(record))
        if known is None or not known.fits(record):
            places = _places(record)
            if places is None:
                return None
            known = self._learnt(record, places)
        return {name: read(record, begin, end) for name, read, begin, end in known.places}

    def parse_alike(self, records: Sequence[bytes], rows: np.ndarray) -> dict[str, np.ndarray | list[bytes]] | None:
        """Return the features of several records: of numbers an array [records, values], else the bytes of each.

        Args:
            records: of one length.
            rows: the same, uint8[records, bytes].

        Returns:
            None where one is laid out in another way.
        """
        known = self._known.get(len(records[0]))
        if known is None or not known.fits(records[0]):
            places = _places(records[0])
            if places is None:
                return None
            known = self._learnt(records[0], places)
        for bytes_, begin in known.between:
            if rows[:, begin : begin + len(bytes_)].tobytes() != bytes_ * len(rows):
                return None
        found: dict[str, np.ndarray | list[bytes]] = {}
        for name, read, begin, end in known.places:
            values: np.ndarray | list[bytes] | None = None
            if read is _bytes:
                values = [record[begin:end] for record in records]
            elif read is parse_int64s and begin < end:
                values = int64_rows(rows[:, begin:end])
            elif read is floats and begin < end and (end - begin) % 4 == 0:
                values = np.ascontiguousarray(rows[:, begin:end]).view("<f4")
            if values is None:
                return None
            found[name] = values
        return found

    def _learnt(self, record: bytes, places: list[_Place]) -> _Known:
        begins = [0, *(end for _, _, _, end in places)]
        between = tuple((record[begin:value], begin) for begin, (_, _, value, _) in zip(begins, places, strict=False))
        wanted = tuple(place for place in places if self._wanted is None or place[0] in self._wanted)
        known = _Known(between, wanted)
        if len(self._known) < _MOST_KNOWN:
            self._known.setdefault(len(record), known)
        return known


def parsed_nbytes(record: bytes) -> int:
    """Return the most that parsing a record takes: strings and packed floats as much as they have, all else more.

    >>> from penstock.data.formats.tfrecord.example import serialize_example
    >>> parsed_nbytes(serialize_example({"x": [bytes(1000)]})), parsed_nbytes(serialize_example({"x": [0] * 1000}))
    (1576, 32576)
    """
    places = _places(record) or []
    kept = sum(end - begin for _, read, begin, end in places if read is not parse_int64s)
    return kept + _TAKEN_OF_EACH * (len(record) - kept)


def _places(record: bytes) -> list[_Place] | None:
    """Return where the values lie; None where the layout is not the usual one, or broken."""
    end = len(record)
    places: list[_Place] = []
    try:
        at = usual_inside(record, 0, end, _FIRST) if end else 0
        while at < end and len(places) < _MOST_FEATURES:
            at, stop = usual_span(record, at, end)
            name_at, value_at = usual_span(record, at, stop)
            kind_at = usual_inside(record, value_at, stop, _SECOND)
            list_at = usual_inside(record, kind_at, stop, record[kind_at])
            begin = usual_inside(record, list_at, stop, _FIRST)
            places.append((record[name_at:value_at].decode(), _VALUES[record[kind_at]], begin, stop))
            at = stop
    except (IndexError, KeyError, ValueError):
        return None
    return places if places and at == end else None
