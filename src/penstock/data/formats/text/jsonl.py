"""JSON: an object in each line, or one list of objects, their members the fields of samples. Plain, or packed.

    number          int or float, as JSON has it; a NumPy number if `dtypes` has the field
    true, false     bool
    text            str
    null            None: for a `map` or a `filter` to deal with
    list            of numbers of one length at each level: an array (int64, uint64, float64 or bool; `dtypes` says
                    otherwise); any other list stays a list
    object          its members are fields too: {"a": {"b": 1}} is the field "a/b"

What JSON does not have is an object too, and `JsonLinesWriter` writes

    {"dtype": "float32", "shape": [2, 3], "base64": "..."}     an array, little endian, in C order
    {"dtype": "int8", "shape": [], "base64": "..."}            a number of NumPy's
    {"base64": "..."}                                          bytes

for all but text, bool, int64, float64 that are finite, and arrays of these with at least one element. Every line is
JSON to the letter: NaN is no word of it, and is written as a number of NumPy's. (NaN and Infinity are read, though.)
Lines are parsed by orjson (the extra "jsonl") where that reads them as json does, else by json.

Blank lines are no records. Of two members of one name the last counts. A list is read whole, by each worker, and may
have `max_record_nbytes`.
"""

from __future__ import annotations

import array
import base64
import binascii
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np

from penstock.core.errors import ExtraError, OptionError, RecordError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.formats.partition_names import check_left_out
from penstock.data.formats.text.lines import LONGEST, Block, blocks
from penstock.data.optional import need
from penstock.data.rows import ConcatIndex
from penstock.data.schema import DTYPES, Errors, Sample, Schema, Selection, fitted
from penstock.data.source import Source
from penstock.data.storage.foreign_files import is_packed
from penstock.data.storage.open_descriptors import OpenDescriptors
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage
from penstock.data.stream import Shard, Stream

_MAX_NAMES_IN_ERROR = 50
"""Of a line's fields, in an error."""
_HEAD_NBYTES = 1024
_TOO_DEEP = "lists or objects lie too deep in each other"
_PLAIN = ("bool", "int64", "float64")


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    index: bool = False,
    dtypes: Mapping[str, str] | None = None,
    max_record_nbytes: int = LONGEST,
) -> JsonLinesStream | IndexedJsonLines:
    """Open JSONL files: a stream, or with `index` a source with random access.

    Args:
        paths: the files; each is a shard.
        storage: opens them.
        fields: which members are read.
        errors: what a stream does with a line that is broken.
        index: find the beginning of every line now, at the speed of the storage, so that samples have numbers. The
            files have to be plain ones.
        dtypes: {field: dtype} for numbers and lists of numbers, as in {"tokens": "int32"}.
        max_record_nbytes: a longer line is broken, and so is a longer list. Parsing one of many tiny values takes some
            40 times its bytes.

    Raises:
        SourceError: a file cannot be opened.
        OptionError: a dtype is unknown, or `index` is set for a file that is packed or a list.
    """
    lines = _LineParser(fields, dtypes or {}, max_record_nbytes)
    stream = JsonLinesStream(paths, storage, lines, errors)
    if fields.chosen is None:
        with suppress(SourceError):  # a broken first line is an error when it is read
            check_left_out(paths, lambda: stream.schema, fields, "open each folder alone, to add {} by map()")
    return IndexedJsonLines([storage.local(path) for path in paths], lines) if index else stream


class JsonLinesStream(Stream):
    """Lines of JSONL files, one after another."""

    def __init__(self, paths: list[str], storage: Storage, lines: _LineParser, errors: Errors) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._storage = storage
        self._lines = lines

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every `step`-th line of a shard, from line `first` on, blank ones not counted."""
        lines = self._lines
        ahead, is_first = first, True  # lines to pass over until the next that is wanted
        with closing(blocks(self._storage, shard.name, lines.longest)) as pieces:
            for block in pieces:
                offsets: list[int] = []
                there = [at for at, line in enumerate(block.lines) if line and not line.isspace()]
                if is_first and there and block.lines[there[0]].lstrip().startswith(b"["):
                    yield from self._read_list(shard, block.lines, pieces, first, step)
                    return
                is_first = is_first and not there
                for at in there[ahead::step]:
                    try:
                        yield lines.sample(block.lines[at])
                    except ValueError as error:
                        offsets = offsets or block.offsets()
                        yield RecordError(shard.name, offsets[at], f"line {block.number + at}", str(error))
                ahead = ahead - len(there) if ahead >= len(there) else (ahead - len(there)) % step

    def _read_list(
        self, shard: Shard, begun: list[bytes], pieces: Iterator[Block], first: int, step: int
    ) -> Iterator[Sample | RecordError]:
        text, longest = b"".join(begun), self._lines.longest
        for block in pieces:
            text += b"".join(block.lines)
            if len(text) > longest:
                break
        if len(text) > longest:
            reason = f"it is longer than max_record_nbytes={longest}, and is read whole; raise that, or write lines"
            raise RecordError(shard.name, 0, "list", reason)
        try:
            found = parse_json(text)
        except ValueError as error:
            raise RecordError(shard.name, 0, "list", str(error)) from error
        for number in range(first, len(found), step):
            try:
                yield self._lines.sample_of(check_object(found[number]))
            except ValueError as error:
                yield RecordError(shard.name, 0, f"object {number}", str(error))


class IndexedJsonLines(Source):
    """Lines of JSONL files by number."""

    def __init__(self, paths: list[str], lines: _LineParser) -> None:
        self.where = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._paths = paths
        self._lines = lines
        self._starts = [_index_lines(path, lines.longest) for path in paths]
        self._parts = ConcatIndex(len(starts) - 1 for starts in self._starts)
        self._files = PerProcess(OpenDescriptors, OpenDescriptors.close)

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, index: int) -> Sample:
        """Return the sample of a line."""
        file, at = self._parts.locate(index)
        start, stop = int(self._starts[file][at]), int(self._starts[file][at + 1])
        try:
            nbytes = min(stop - start, self._lines.longest + 4)
            line = self._files.get().read(self._paths[file], start, nbytes)
            if len(line) < nbytes:
                raise ValueError(
                    f"the file ends {nbytes - len(line)} bytes too early; it was longer when it was opened"
                )
            return self._lines.sample(line)
        except ValueError as error:
            raise RecordError(self._paths[file], start, index, str(error)) from error

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _index_lines(path: str, longest: int) -> np.ndarray:
    """Return where each line of a file that is not blank begins, and where the file ends.

    A blank line's bytes belong to the line before, as white space.
    """
    found = [np.zeros(0, np.int64)]
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_NBYTES)
            if is_packed(head) or head.lstrip().startswith(b"["):
                words = "is packed" if is_packed(head) else "is one list of objects"
                raise OptionError(f"{path} {words}, and index= needs plain lines; write them, or pass index=False")
        for block in blocks(Storage(), path, longest):
            lines = zip(block.offsets(), block.lines, strict=True)
            found.append(np.array([start for start, line in lines if line and not line.isspace()], np.int64))
        return np.append(np.concatenate(found), os.path.getsize(path))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


class _LineParser:
    """Makes samples of lines."""

    def __init__(self, fields: Selection, dtypes: Mapping[str, str], longest: int) -> None:
        for name, dtype in dtypes.items():
            if dtype not in DTYPES:
                raise OptionError(f"dtypes[{name!r}] is {dtype!r}, and has to be one of {', '.join(sorted(DTYPES))}")
        self.longest = longest
        self._chosen = fields.chosen
        self._wanted = None if fields.chosen is None else {own for _, own in fields.chosen}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}

    def sample(self, line: bytes) -> Sample:
        """Return the sample of a line.

        Raises:
            ValueError: what is wrong with it.
        """
        if len(line) > self.longest and len(line.rstrip()) > self.longest:
            raise ValueError(f"it is longer than max_record_nbytes={self.longest}")
        try:
            return self.sample_of(check_object(parse_json(line)))
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None

    def sample_of(self, members: dict[str, Any]) -> Sample:
        """Return the sample of an object.

        Raises:
            ValueError: what is wrong with it.
        """
        found: Sample = {}
        try:
            self._flatten(members, "", found, self.longest)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        if self._chosen is None:
            return found
        missing = [own for _, own in self._chosen if own not in found]
        if missing:
            there = ", ".join(map(repr, [*found][:_MAX_NAMES_IN_ERROR])) or "none"
            raise ValueError(f"it has no field {missing[0]!r}; it has {there}")
        return {name: found[own] for name, own in self._chosen}

    def _flatten(self, members: dict[str, Any], before: str, into: Sample, room: int) -> int:
        """Put members among the fields, and return what is left of the room for the names before their own.

        A long name of an object is repeated for each of its members: 2 MB with 100 000 would take 100 GB.
        """
        room -= len(before) * len(members)
        if room < 0:
            raise ValueError(f"the fields' names are longer than max_record_nbytes={self.longest}")
        for own, value in members.items():
            name = before + own if before else own
            if name in into:
                raise ValueError(f"the field {name!r} is there twice")
            kind = type(value)
            if kind is str:
                into[name] = value
            elif kind is dict:
                if "base64" in value and value.keys() in _PACKED:
                    into[name] = _decode_base64(value)
                else:
                    room = self._flatten(value, f"{name}/", into, room)
            elif self._wanted is not None and name not in self._wanted:
                into[name] = None
            else:
                dtype = self._dtypes.get(name)
                try:
                    into[name] = _parse_array(value, dtype) if kind is list else _parse_number(value, kind, dtype)
                except ValueError as error:
                    raise ValueError(f"field {name!r}: {error}") from error
        return room


def parse_json(text: bytes) -> Any:
    """Return what some JSON says; of two members of one name the last.

    orjson makes a float of an integer that has more than 64 bits, and knows no NaN: such text is left to json.

    Raises:
        ValueError: what is wrong with it.

    >>> parse_json(b'{"x": [1, 2.5, NaN]}'), parse_json(b"18446744073709551616")
    ({'x': [1, 2.5, nan]}, 18446744073709551616)
    """
    if _orjson is not None and _LONG_NUMBER not in text.translate(_DIGITS_TO_0):
        try:
            return _orjson.loads(text)
        except ValueError:  # json says why, or knows it: NaN
            pass
    decoded = text.decode()
    found = json.loads(decoded)
    if "\\" in decoded and ("\\ud" in decoded or "\\uD" in decoded):
        json.dumps(found, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    return found


def check_object(found: Any) -> dict[str, Any]:
    """Return what is an object.

    Raises:
        ValueError: it is none.
    """
    if type(found) is not dict:
        raise ValueError(f"it holds {_WORDS.get(type(found), 'a number')}, not an object")
    return found


_WORDS = {list: "a list", str: "a text", bool: "a bool", type(None): "null"}


def _usable_orjson() -> Any:
    """Return orjson; None where it is not installed, or ends the process over deep lists (CVE-2024-27454)."""
    try:
        orjson = need("orjson", "jsonl")
    except ExtraError:
        return None
    version = tuple(map(int, re.findall(r"\d+", orjson.__version__)[:3]))
    return orjson if version >= (3, 9, 15) else None


_orjson = _usable_orjson()
_LONG_NUMBER = b"0" * 19
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")


_PACKED = ({"base64"}, {"dtype", "shape", "base64"})


def _parse_number(value: Any, kind: type, dtype: np.dtype[Any] | None) -> Any:
    is_int64 = kind is not int or -(1 << 63) <= value < 1 << 63
    if not is_int64 and (value >= 1 << 64 or value < 0):
        raise ValueError("it has an integer that does not fit into 64 bits")
    if dtype is None or value is None:
        return value if is_int64 else np.uint64(value)
    try:
        return _parse_array([value], dtype)[0]
    except ValueError:
        raise ValueError(f"it is {value}, which does not fit into {dtype}; dtypes= sets another type") from None


def _parse_array(value: list[Any], dtype: np.dtype[Any] | None) -> Any:
    """Return an array of a list of numbers; any other list as it is."""
    kind = _CODES.get(type(value[0])) if value and (dtype is None or dtype.kind == "f") else None
    if kind is not None:
        try:
            quick = np.frombuffer(array.array(kind[0], value), kind[1])  # half of what NumPy takes to look at them all
            if dtype is not None:
                return _cast(quick, dtype)
            if kind[0] == "q" or math.hypot(*value) < _EXACT:  # and so is each of them
                return quick
        except (TypeError, *_TOO_LARGE):
            pass  # others among them
    kinds: set[type] = set()
    if not _is_of_numbers(value, kinds):
        return value
    misfit = ValueError(f"a list holds numbers that do not fit into {'64 bits' if dtype is None else dtype}")
    if float in kinds and dtype is not None and dtype.kind in "biu":
        raise misfit
    try:
        made = _cast(value, dtype)
    except _TOO_LARGE as error:
        raise misfit from error
    except ValueError:
        return value  # lists of different lengths
    kind = made.dtype.kind
    is_other = int in kinds and kind == "b" and _loses_digits(value, made.tolist())  # 2 is not True
    if is_other or kind not in "biufc":
        raise misfit
    may_lose = int in kinds and kind == "f" and dtype is None and bool((np.abs(made) >= _EXACT).any())
    if may_lose and (float not in kinds or _loses_digits(value, made.tolist())):
        raise ValueError(
            "a list holds an integer that float64 does not hold, and numbers that no other type of 64 bits does; "
            "dtypes= sets another type"
        )
    return made


def _cast(value: Any, dtype: np.dtype[Any] | None) -> Any:
    with np.errstate(over="raise"):  # what a float type has as infinity only
        return np.asarray(value, dtype)


_TOO_LARGE = (OverflowError, FloatingPointError)


def _loses_digits(value: Any, made: Any) -> bool:
    if type(value) is list:
        return any(map(_loses_digits, value, made))
    return type(value) is int and value != made


_CODES = {float: ("d", np.float64), int: ("q", np.int64)}
_EXACT = 1 << 53
"""Up to here float64 has all integers."""


def _is_of_numbers(value: list[Any], kinds: set[type]) -> bool:
    # NumPy would make text as wide as the longest of a list of texts: a small file could ask for any amount of memory.
    here = set(map(type, value))
    if here == {list}:
        return all(_is_of_numbers(one, kinds) for one in value)
    kinds |= here
    return here <= {int, float, bool}


def _decode_base64(value: dict[str, Any]) -> Any:
    try:
        data = base64.b64decode(value["base64"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f'"base64" cannot be decoded: {error}') from error
    if len(value) == 1:
        return data
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f'"dtype" is {str(dtype)[:40]!r}, and has to be one of {", ".join(sorted(DTYPES))}')
    if not isinstance(shape, list) or len(shape) > 32 or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f'"shape" is {str(shape)[:80]}, and has to be a list of sizes')
    little = np.dtype(dtype).newbyteorder("<")
    if math.prod(shape) * little.itemsize != len(data):
        raise ValueError(f'"base64" has {len(data)} bytes; {dtype} of shape {str(shape)[:80]} has others')
    made = np.frombuffer(data, little).astype(dtype)
    return made.reshape(shape) if shape else made[0]


class JsonLinesWriter:
    """Writes a new JSONL file; one packed by gzip where its name ends on .gz."""

    def __init__(self, path: str, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._file = SequentialWriter(path)
        self._encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

    def write(self, sample: Sample) -> None:
        """Add a line."""
        values = fitted(self._schema, sample, self._path)
        text = self._encode({name: _to_json(value) for name, value in values.items()})
        self._file.write(text.encode() + b"\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def _to_json(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    dtype = value.dtype.newbyteorder("=").name
    if dtype in _PLAIN and value.size and (dtype != "float64" or np.isfinite(value).all()):
        return value.tolist()
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes()
    return {"dtype": dtype, "shape": list(value.shape), "base64": base64.b64encode(data).decode()}


def why_unsupported(schema: Schema) -> str:
    """Return why samples would not come back from JSONL as they are; "" if they would.

    >>> from penstock.data.schema import Field
    >>> why_unsupported({"x": Field("array", "float32", (3,))})
    ''
    """
    for name, field in schema.items():
        if field.dtype and field.dtype not in DTYPES:
            return f"field {name!r} is {field.words()}, and JSONL has no {field.dtype}"
    return ""
