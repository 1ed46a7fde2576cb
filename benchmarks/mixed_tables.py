"""Folders of Arrow or Parquet files that differ in unit, dtype or byte order, for `fuzz`."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np


def write_folders(folder: Path, suffix: str) -> list[Path]:
    """Write a folder of files in several units, and one of files in several dtypes; return both.

    All values of the first, in nanoseconds, are 0, 1000, 2000 ...
    """
    import pyarrow as pa

    units: list[tuple[Any, int]] = [(pa.timestamp("us"), 1), (pa.timestamp("ns"), 1000)]
    dtypes: list[tuple[Any, int]] = [(pa.int64(), 1), (pa.int32(), 1)]
    found = []
    for name, types in (("units", units), ("dtypes", dtypes)):
        (folder / name).mkdir()
        found.append(folder / name)
        for number, (type, step) in enumerate(types):
            first = 4 * number
            array = pa.array([step * value for value in range(first, first + 4)], type)
            _write(pa.table({"x": array}), folder / name / f"{number}{suffix}")
    if suffix == ".arrow":
        stream = pa.BufferOutputStream()
        table = pa.table({"x": pa.array(range(8, 12), pa.timestamp("us"))})
        with pa.ipc.new_stream(stream, table.schema) as sink:
            sink.write_table(table)
        (folder / "units" / "2.arrow").write_bytes(as_big_endian(stream.getvalue().to_pybytes()))
    return found


def _write(table: Any, path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path)
        return
    import pyarrow as pa

    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)


def as_big_endian(stream: bytes) -> bytes:
    """Return a stream of one batch with one column of 64-bit numbers, as a machine of the other byte order writes it.

    Its schema gets a field "endianness": the vtable's place for it, 0 so far, points to any int16 that is 1.
    """
    import pyarrow as pa

    data = bytearray(stream)
    (nbytes,) = struct.unpack_from("<i", data, 4)
    metadata = stream[8 : 8 + nbytes]
    root = struct.unpack_from("<I", metadata)[0]
    place = root + _slot(metadata, root, 2)  # of the header, a Schema
    table = place + struct.unpack_from("<I", metadata, place)[0]
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    one = next(at for at in range(table + 4, nbytes - 1, 2) if metadata[at : at + 2] == b"\1\0")
    struct.pack_into("<H", data, 8 + vtable + 4, one - table)
    _, batch = pa.ipc.MessageReader.open_stream(stream)
    body = batch.body.to_pybytes()
    begin = stream.rindex(body)
    data[begin : begin + len(body)] = np.frombuffer(body, "<i8").byteswap().tobytes()
    return bytes(data)


def _slot(metadata: bytes, table: int, number: int) -> int:
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    return int(struct.unpack_from("<H", metadata, vtable + 4 + 2 * number)[0])
