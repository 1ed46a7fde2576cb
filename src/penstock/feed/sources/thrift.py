"""Thrift's compact protocol, as far as Parquet's footers and page headers need it: a struct's bytes to plain values.

A struct is {field number: value}; integers are int, binaries bytes, lists lists, structs dicts. Everything that is read
costs a byte of the input at least, so that what comes out is no larger than some times what went in.

Source: Apache Thrift, "Thrift Compact protocol encoding".
"""

from __future__ import annotations

from typing import Any

Struct = dict[int, Any]

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MOST_DEPTH = 16


class ThriftError(ValueError):
    """Bytes that are no such struct."""


def struct_of(data: bytes | memoryview) -> tuple[Struct, int]:
    """Return the struct that begins `data`, and how many bytes it takes.

    Raises:
        ThriftError: there is none, or not all of it.

    >>> struct_of(bytes([0x15, 0x02, 0x18, 0x02]) + b"ab" + bytes([0x00]))
    ({1: 1, 2: b'ab'}, 7)
    """
    reader = _Reader(data)
    try:
        found = reader.struct(0)
    except IndexError:
        raise ThriftError(f"the struct does not end within its {len(data)} bytes") from None
    return found, reader.at


class _Reader:
    def __init__(self, data: bytes | memoryview) -> None:
        self.at = 0
        self._data = data

    def struct(self, depth: int) -> Struct:
        if depth > _MOST_DEPTH:
            raise ThriftError(f"structs lie in each other more than {_MOST_DEPTH} deep")
        found: Struct = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            found[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in (_BYTE, _TRUE, _FALSE):
            return self._byte()
        if kind == _DOUBLE:
            return self._take(8)
        raise ThriftError(f"a field is of type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = self._varint() if head >> 4 == 15 else head >> 4
        if count > len(self._data) - self.at:
            raise ThriftError(f"a list says to have {count} elements")
        return [self._value(head & 15, depth) for _ in range(count)]

    def _byte(self) -> int:
        byte = self._data[self.at]
        self.at += 1
        return byte

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ThriftError(f"{count} bytes are said to follow, and {len(self._data) - self.at} do")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ThriftError("a number of more than ten bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
