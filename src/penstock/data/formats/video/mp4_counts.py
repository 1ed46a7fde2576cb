"""Checks, before FFmpeg opens an MP4 or MOV, that its tables state no more frames than the file can hold.

FFmpeg makes an index of all frames that a file states, 40 bytes for each, before it looks for one: a file of 1 kB can
take 4 GiB. All but the data (`mdat`) is searched for the tables that state a number beside no entries; what the
numbers make together may not be more than the file has bytes.

    stsz, stz2     frames of a track                        trun          frames of a fragment
    elst           parts of a track, each an index again    stsc × stco   frames of chunks, 160 together at least
    sgpd, keys     entries                                  cmov          a compressed header: refused
    sidx           where fragments begin: at boxes of the file only, or FFmpeg would find others among the data

ISO/IEC 14496-12, and QuickTime's format.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from typing import Any

FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"uuid", b"junk", b"pict")
"""With which a file begins that is opened as MP4 or MOV; any other one is not."""

_HEADER = struct.Struct(">I4s")
_TABLE = re.compile(rb"stsz|stz2|trun|elst|stsc|stco|co64|sgpd|keys|cmov|sidx")
_COUNT_AT = {b"stsz": 8, b"stz2": 8, b"trun": 4, b"elst": 4, b"stsc": 4, b"stco": 4, b"co64": 4, b"keys": 4}
_LEAST_TOGETHER = 160
_TEXT = 0x20000000
"""What looks like a number of keys and is at least that is text: FFmpeg refuses so many."""


def check_counts(path: str) -> None:
    """Raise ValueError if the tables of a file state more than it can hold; other containers have none of these."""
    nbytes = os.path.getsize(path)
    if not nbytes:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _Counts(data)
        for kind, begin, at, end in _boxes(data):
            found.starts.add(begin)
            if kind == b"mdat":
                continue
            if end > nbytes:
                raise ValueError(f"its box {kind!r} at byte {begin} ends behind the end of the file")
            if kind == b"sidx":
                found.add_fragments(at, end)
            elif kind != b"uuid":
                found.add_tables(begin, end)
        found.check(nbytes)


def _boxes(data: Any) -> Any:
    """Yield each box of a file: its kind, where it begins, and where what is in it begins and ends."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind = _HEADER.unpack_from(data, at)
        begin, at, end = at, at + _HEADER.size, at + size
        if size == 1 and at + 8 <= len(data):
            end, at = begin + int.from_bytes(data[at : at + 8], "big"), at + 8
        elif size == 0:
            end = len(data)
        if end < at:  # FFmpeg stops here
            return
        yield kind, begin, at, end
        at = end


class _Counts:
    """What the tables of a file state together."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.starts = set[int]()
        self._fragments = set[int]()
        self._frames = self._parts = self._entries = 0
        self._most_in_chunk = self._chunks = 0

    def add_tables(self, begin: int, end: int) -> None:
        """Add those of a box, and of the boxes in it."""
        for one in _TABLE.finditer(self._data, begin, end):
            name, at = one[0], one.end()
            if name in (b"cmov", b"sidx"):
                raise ValueError(f"its header has a box {name.decode()!r}, which is not read; remux it: ffmpeg -c copy")
            count = self._number(at + _COUNT_AT.get(name, 8))
            if name in (b"stsz", b"stz2", b"trun"):
                self._frames += count
            elif name == b"elst":
                self._parts += min(count, (end - at) // 12)  # FFmpeg takes no more either
            elif name == b"stsc":
                table = self._data[at + 8 : at + 8 + 12 * min(count, (end - at - 8) // 12)]
                self._most_in_chunk = max([self._most_in_chunk, *(n for _, n, _ in struct.iter_unpack(">III", table))])
            elif name in (b"stco", b"co64"):
                self._chunks += min(count, (end - at) // 4)
            elif name == b"keys":
                self._entries += count if count < _TEXT else 0
            else:
                version = self._data[at] if at < end else 0
                self._entries += self._number(at + 8 + 4 * min(version, 2))

    def add_fragments(self, begin: int, end: int) -> None:
        """Add where the fragments of an index begin."""
        wide = 8 if self._data[begin : begin + 1] == b"\1" else 4
        at = end + int.from_bytes(self._data[begin + 12 + wide : begin + 12 + 2 * wide], "big")
        first = begin + 16 + 2 * wide
        for place in range(first, min(first + 12 * (self._number(first - 4) & 0xFFFF), end), 12):
            self._fragments.add(at)
            at += self._number(place)

    def check(self, nbytes: int) -> None:
        """Raise ValueError if that is more than `nbytes`, those of the file, can hold."""
        stated = max(self._frames * max(1, self._parts), self._chunks * self._most_in_chunk // _LEAST_TOGETHER)
        if max(stated, self._entries) > nbytes:
            raise ValueError(f"its tables state {max(stated, self._entries)} frames, and the file has {nbytes} bytes")
        if any(at < nbytes and at not in self.starts for at in self._fragments):
            raise ValueError("its index (sidx) states fragments where no box begins")

    def _number(self, at: int) -> int:
        return int.from_bytes(self._data[at : at + 4], "big")
