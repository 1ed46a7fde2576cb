"""What chunks of Zarr may unpack to, checked before memory is taken: the package's codecs unpack all that there is.

zstd, blosc, lz4            the size that a chunk states is compared with the limit, then the package unpacks it
gzip, zlib, bz2, lzma       state none: they are unpacked here, to no more than the limit
filters of numbers, vlen    are bounded by the types that they name, and by how many values they state
other codecs                are refused: nobody knows what they unpack to, and one of numcodecs (pickle) runs code
"""

from __future__ import annotations

import asyncio
import bz2
import lzma
import math
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numcodecs.abc import Codec as Numcodec  # type: ignore[import-untyped]
from zarr import Array, AsyncArray
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec
from zarr.codecs import ShardingCodec

from penstock.core.errors import SourceError

_OBJECT_NBYTES = 64
"""What a text, or bytes, takes beside its characters, with the reference to it."""

_NUMBER_NBYTES = np.dtype(np.complex128).itemsize
_ZSTD_MAGIC, _ZSTD_BLOCK_NBYTES = b"\x28\xb5\x2f\xfd", 128 << 10


class TooLargeError(ValueError):
    """A chunk unpacks to more than is allowed, or does not say to how much."""


def bounded(array: Any, where: str, max_nbytes: int, more_codecs: Collection[str] = ()) -> Any:
    """Return an array whose codecs raise TooLargeError for a chunk that unpacks to more than `max_nbytes`.

    `more_codecs` names others that are let through, unbounded.

    Raises:
        SourceError: it has a codec of which that cannot be said.
    """
    metadata, limit = array.metadata, _Limit(where, max_nbytes, math.prod(array.chunks), more_codecs)
    if metadata.zarr_format == 2:
        filters = metadata.filters and [_BoundedNumcodec(one, limit) for one in metadata.filters]
        compressor = metadata.compressor and _BoundedNumcodec(metadata.compressor, limit)
        metadata = replace(metadata, filters=filters, compressor=compressor)
    else:
        metadata = replace(metadata, codecs=_bounded_all(metadata.codecs, limit))
    return Array(AsyncArray(metadata=metadata, store_path=array.store_path))


def _bounded_all(codecs: Iterable[Any], limit: _Limit) -> list[Any]:
    found: list[Any] = []
    for codec in codecs:
        if isinstance(codec, ShardingCodec):
            codecs, index_codecs = (tuple(_bounded_all(one, limit)) for one in (codec.codecs, codec.index_codecs))
            found.append(replace(codec, codecs=codecs, index_codecs=index_codecs))
            continue
        stated = codec.to_dict()
        rule = limit.rule(stated["name"], stated.get("configuration", {}))
        if isinstance(codec, BytesBytesCodec):
            found.append(_BoundedCodec(codec, rule))
        elif isinstance(codec, ArrayArrayCodec):  # it has as many numbers as the chunk, whatever it is given
            limit.check_numbers(limit.values, stated["name"])
            found.append(codec)
        else:
            found += [codec, _BoundedCodec(None, rule)]  # unpacked by the codec, once its bytes are checked
    return found


class _Rule(NamedTuple):
    check: Callable[[memoryview], None]
    unpack: Callable[[memoryview], bytes] | None = None
    """What unpacks in place of the codec."""


class _Limit(NamedTuple):
    where: str
    nbytes: int
    values: int
    """How many a chunk has."""

    more_codecs: Collection[str]

    def check(self, nbytes: int, codec: str) -> None:
        if nbytes > self.nbytes:
            raise TooLargeError(
                f"the codec {codec!r} unpacks a chunk to {nbytes} bytes or more; {self.nbytes} are the most; raise "
                "max_record_nbytes if that is right"
            )

    def check_numbers(self, count: int, codec: str) -> None:
        """Filters may compute with larger numbers than they give."""
        self.check(count * _NUMBER_NBYTES, codec)

    def check_objects(self, data: memoryview, codec: str) -> None:
        count = int.from_bytes(data[:4], "little")
        if count > self.values:
            raise TooLargeError(f"a chunk of {self.values} values states {count}")
        self.check(len(data) + count * _OBJECT_NBYTES, codec)

    def rule(self, name: str, config: dict[str, Any]) -> _Rule:
        """Return how the chunks of a codec are bounded.

        Raises:
            SourceError: nobody knows.
        """
        codec = name.removeprefix("numcodecs.")
        if codec in _STREAMS:
            return _Rule(lambda data: None, partial(_decompress, self, codec, partial(_STREAMS[codec], config)))
        if codec in _OF_NUMBERS:
            itemsize = _narrow_itemsize(config, f"{self.where}: the filter {codec!r}")
            return _Rule(lambda data: self.check_numbers(len(data) // itemsize, codec))
        if codec in ("vlen-bytes", "vlen-utf8"):
            return _Rule(lambda data: self.check_objects(data, codec))
        if codec in _STATED:
            return _Rule(lambda data: self.check(_STATED[codec](data), codec))
        if codec in self.more_codecs:
            return _Rule(lambda data: None)
        raise SourceError(
            f"{self.where} is packed by the codec {codec!r}, and nobody can tell what its chunks unpack to before they "
            f"are; pass more_codecs=[{codec!r}] if you trust who wrote it, or write it with zstd, blosc, lz4 or gzip"
        )


class _BoundedNumcodec(Numcodec):  # type: ignore[misc] # of a package without types
    """A filter or compressor of version 2."""

    codec_id = ""

    def __init__(self, inner: Any, limit: _Limit) -> None:
        self.codec_id = inner.codec_id
        self._inner, self._rule = inner, limit.rule(inner.codec_id, inner.get_config())

    def get_config(self) -> Any:
        return self._inner.get_config()

    def encode(self, buf: Any) -> Any:
        return self._inner.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        data = _as_bytes(buf)
        self._rule.check(data)
        return self._rule.unpack(data) if self._rule.unpack else self._inner.decode(buf, out)


@dataclass(frozen=True)
class _BoundedCodec(BytesBytesCodec):
    """A codec of version 3, from bytes to bytes."""

    inner: Any
    """None if it only checks."""

    rule: _Rule

    @property
    def is_fixed_size(self) -> bool:  # type: ignore[override]
        return self.inner is None or bool(self.inner.is_fixed_size)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return int(self.inner.compute_encoded_size(input_byte_length, chunk_spec)) if self.inner else input_byte_length

    async def decode(self, chunks_and_specs: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        chunks = [*chunks_and_specs]
        for data, _ in chunks:
            if data is not None:
                self.rule.check(_as_bytes(data.as_numpy_array()))
        if self.rule.unpack:
            return await asyncio.gather(*(self._unpack(self.rule.unpack, *one) for one in chunks))
        return await self.inner.decode(chunks) if self.inner else [data for data, _ in chunks]

    async def _unpack(self, unpack: Callable[[memoryview], bytes], data: Any, spec: Any) -> Any:
        if data is None:
            return None
        found = await asyncio.to_thread(unpack, _as_bytes(data.as_numpy_array()))
        return spec.prototype.buffer.from_bytes(found)


def _as_bytes(data: Any) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


# ── what each codec unpacks to ──────────────────────────────────────────────────────────────────────────────


_OF_NUMBERS = ("astype", "delta", "fixedscaleoffset", "quantize")


def _narrow_itemsize(config: dict[str, Any], what: str) -> int:
    """Return the bytes of what is given to a filter of numbers."""
    types = [np.dtype(config[name]) for name in ("astype", "encode_dtype", "dtype", "decode_dtype") if name in config]
    if any(one.kind not in "biufcmM" for one in types):
        raise SourceError(f"{what} names types that are no numbers: {', '.join(map(str, types))}")
    return int(types[0].itemsize)


def _zstd_nbytes(data: memoryview) -> int:
    """Return what the first frame states; if it states nothing, the most that the blocks of all frames may hold.

    https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1

    >>> _zstd_nbytes(memoryview(_ZSTD_MAGIC + bytes([0b0110_0000, 1, 2]) + bytes(9)))
    769
    """
    at, total = 0, 0
    while at < len(data):
        if data[at : at + 4] != _ZSTD_MAGIC or len(data) < at + 6:
            raise TooLargeError("a chunk has other bytes than frames of zstd")
        flags = data[at + 4]
        is_single, size = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
        size = size or is_single
        at += 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        if size and not total:
            return int.from_bytes(data[at : at + size], "little") + (256 if size == 2 else 0)
        at, is_last = at + size, False
        while not is_last:
            block = int.from_bytes(data[at : at + 3], "little")
            is_last, is_repeated = bool(block & 1), block >> 1 & 3 == 1
            at += 3 + (1 if is_repeated else block >> 3)
            if at > len(data):
                raise TooLargeError("a chunk is cut off within a block of zstd")
            total += _ZSTD_BLOCK_NBYTES
        at += 4 * (flags >> 2 & 1)  # a checksum
    return total


_STATED: dict[str, Callable[[memoryview], int]] = {
    "zstd": _zstd_nbytes,
    "blosc": lambda data: int.from_bytes(data[4:8], "little"),
    "lz4": lambda data: int.from_bytes(data[:4], "little"),
    "packbits": lambda data: len(data) * 8,
    **dict.fromkeys(("bitround", "bytes", "shuffle", "transpose"), len),
    **dict.fromkeys(("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"), len),
}
"""Returns the most that a codec makes of bytes."""

_STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda _: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "zlib": lambda _: zlib.decompressobj(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": lambda config: lzma.LZMADecompressor(
        config.get("format", lzma.FORMAT_XZ),
        filters=config.get("filters") if config.get("format") == lzma.FORMAT_RAW else None,
    ),
}
"""Returns what decompresses one stream, given the codec's configuration."""


def _decompress(limit: _Limit, codec: str, begin: Callable[[], Any], data: memoryview) -> bytes:
    """Return what streams hold, of which there may be several, one after another."""
    parts: list[bytes] = []
    left: Any = data
    while len(left):
        stream = begin()
        parts.append(stream.decompress(left, limit.nbytes + 1 - sum(map(len, parts))))
        limit.check(sum(map(len, parts)), codec)
        if not stream.eof:
            raise EOFError(f"a chunk is cut off within what {codec} packed")
        left = stream.unused_data.lstrip(b"\0")  # gzip may be filled up with zeros
    return parts[0] if len(parts) == 1 else b"".join(parts)
