"""TFRecord files: a stream of records, or a source by number; with tf.train.Example in them, or anything else.

See framing.py for the file's layout, example.py and features.py for what is in a record. Checksums need the
package google-crc32c (the extra "tfrecord"); `check=False` reads without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError
from penstock.core.per_process import PerProcess
from penstock.data.formats.tfrecord.example import (
    MalformedError,
    Steps,
    Values,
    parse_alike,
    parse_feature_lists,
    parse_features,
    parse_usual,
    parsed_nbytes,
)
from penstock.data.formats.tfrecord.features import (
    MARK,
    SchemaEncoder,
    decode_sample,
    to_field_value,
    with_shape_features,
)
from penstock.data.formats.tfrecord.framing import (
    FOOTER,
    FRAME_NBYTES,
    HEADER,
    AlikeRecords,
    check_header,
    load_checksum,
    read_frames,
    scan_offsets,
    too_long_message,
    too_short_message,
)
from penstock.data.rows import ConcatIndex
from penstock.data.sample_batch import samples_of
from penstock.data.schema import Errors, Sample, Schema, Selection
from penstock.data.source import Source
from penstock.data.storage.open_descriptors import OpenDescriptors
from penstock.data.storage.sequential_reader import SequentialReader
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage
from penstock.data.stream import Shard, Stream

_EMPTY_NBYTES = 2
"""Of an Example without features."""
_HARMLESS_NBYTES = 1 << 20
"""Of a record that is parsed whatever it takes."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    index: bool = False,
    check: bool = True,
    raw: bool = False,
    text: Sequence[str] = (),
    arrays: Sequence[str] = (),
    null: Mapping[str, Any] | None = None,
    max_record_nbytes: int = 1 << 30,
) -> TFRecordStream | IndexedTFRecords:
    """Open TFRecord files.

    Args:
        paths: the files.
        storage: opens them.
        fields: which features a sample gets.
        errors: what a stream does with broken records.
        index: read by number. The records' places are found now, from their lengths. Not for gzipped files.
        check: verify checksums.
        raw: a sample is {"record": bytes}; nothing is parsed.
        text: features that are UTF-8: str instead of bytes.
        arrays: features that are an array (or a list of bytes) even where they have one value.
        null: the value of features that a record lacks, or has without values, as TFX writes a missing one; without it
            the latter are None.
        max_record_nbytes: a longer record is broken, and so is one whose parsing may take more: strings of bytes and
            floats take what they have, integers and features 32 times that.

    The feature lists of SequenceExamples are fields too: an array with a row for each step where all steps have as many
    numbers, else a list of the steps' values.

    Raises:
        SourceError: a file cannot be read.
        ExtraError: `check` is set, and google-crc32c is not installed.
        OptionError: `index` is no bool, or `text` or `arrays` no list.
    """
    for option, features in (("text", text), ("arrays", arrays)):
        if isinstance(features, str):
            raise OptionError(f"{option}={features!r} has to be a list of features, as in [{features!r}]")
    if not isinstance(index, bool):
        raise OptionError(f"index={index!r} is neither True nor False: with True the records' places are found now")
    if check:
        load_checksum()
    parse = RecordParser(
        fields=fields,
        raw=raw,
        text=frozenset(text),
        arrays=frozenset(arrays),
        null=null or {},
        most=max_record_nbytes,
    )
    if not index:
        return TFRecordStream(paths, storage, errors, parse, check=check)
    return IndexedTFRecords([storage.local(path) for path in paths], parse, check=check)


@dataclass(frozen=True, kw_only=True)
class RecordParser:
    """Makes samples of records; see `open_files`."""

    fields: Selection
    raw: bool = False
    text: frozenset[str] = frozenset()
    arrays: frozenset[str] = frozenset()
    null: Mapping[str, Any] = field(default_factory=dict)
    most: int = 1 << 30
    """The most bytes that a record, and what is made of it, may have."""

    @cached_property
    def _wanted(self) -> frozenset[str] | None:
        chosen = self.fields.chosen
        return None if chosen is None else with_shape_features([name for _, name in chosen])

    def sample(self, record: bytes) -> Sample:
        """Return a record's sample.

        Raises:
            ValueError: it is no such record, or a field is missing.
        """
        if self.raw:
            return {"record": record}
        if len(record) > _HARMLESS_NBYTES and (nbytes := parsed_nbytes(record)) > self.most:
            raise MalformedError(f"parsing it may take {nbytes} bytes; {self.most} are the most (max_record_nbytes)")
        features: Mapping[str, Values | None] | None = parse_usual(record, self._wanted)
        lists: dict[str, Steps] = {}
        if features is None:
            features, lists = parse_features(record, self._wanted), parse_feature_lists(record, self._wanted)
            if not features and not lists and len(record) > _EMPTY_NBYTES and self._wanted is None:
                raise MalformedError("it has no features, as of no tf.train.Example; raw=True gives its bytes")
        if MARK in features:
            return decode_sample(features, self.fields)
        sample = {
            name: self.null.get(name)
            if values is None
            else to_field_value(values, is_text=name in self.text, is_array=name in self.arrays)
            for name, values in features.items()
        }
        sample |= {name: self._rows(name, steps) for name, steps in lists.items()}
        sample |= {name: value for name, value in self.null.items() if name not in sample}
        if self.fields.chosen is None:
            return sample
        if any(name not in sample for _, name in self.fields.chosen):
            self.fields.names([*parse_features(record), *parse_feature_lists(record)], "it")
        return {own: sample[name] for own, name in self.fields.chosen}

    def samples(self, records: AlikeRecords) -> list[Sample] | None:
        """Return the samples of many records at once; None where they have to be parsed one by one."""
        if self.raw:
            return [{"record": record} for record in records.data]
        try:
            found = parse_alike(records.data, records.rows, self._wanted)
            if found is None or MARK in found:
                return None
            columns = {name: self._column(name, values) for name, values in found.items()}
        except MalformedError:
            return None
        names = self.fields.chosen or [(name, name) for name in columns]
        if any(own not in columns for _, own in names) or not self.null.keys() <= columns.keys():
            return None
        return samples_of([name for name, _ in names], [columns[own] for _, own in names])

    def _column(self, name: str, values: np.ndarray | list[bytes]) -> Sequence[object] | np.ndarray:
        is_array = name in self.arrays
        if isinstance(values, list):
            is_text = name in self.text
            return [to_field_value([value], is_text=is_text, is_array=is_array) for value in values]
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        return values[:, 0] if values.shape[1] == 1 and not is_array else values

    def _rows(self, name: str, steps: Steps) -> object:
        if isinstance(steps, np.ndarray):
            rows = steps[:, 0] if steps.shape[1] == 1 and name not in self.arrays else steps
            return rows.astype(rows.dtype.newbyteorder("="))
        values = [to_field_value(step, is_text=name in self.text, is_array=name in self.arrays) for step in steps]
        shapes = {(np.shape(value), getattr(value, "dtype", None)) for value in values if not isinstance(value, list)}
        if len(shapes) == 1 and isinstance(values[0], np.ndarray | np.generic):
            return np.stack(values)
        return values


class TFRecordStream(Stream):
    """TFRecord files as a stream; see `open_files`."""

    def __init__(self, paths: list[str], storage: Storage, errors: Errors, parse: RecordParser, *, check: bool) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{len(paths)} TFRecord files"
        self._storage = storage
        self._parse = parse
        self._check = check

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every step-th record's sample; of the others nothing but the length is read."""
        with closing(SequentialReader(self._storage, shard.name)) as pieces:
            checksum = load_checksum() if self._check else None
            for found in read_frames(pieces, first, step, checksum, self._parse.most):
                if not isinstance(found, AlikeRecords):
                    yield self._sample(shard, *found)
                elif (samples := self._parse.samples(found)) is not None:
                    yield from samples
                else:
                    for at, record in enumerate(found.data):
                        yield self._sample(shard, *found.place(at), record)

    def _sample(self, shard: Shard, number: int, offset: int, record: bytes | RecordError) -> Sample | RecordError:
        try:
            return record if isinstance(record, RecordError) else self._parse.sample(record)
        except ValueError as error:
            return RecordError(shard.name, offset, number, str(error))


# ── by number ───────────────────────────────────────────────────────────────────────────────────────────────


class IndexedTFRecords(Source):
    """Local TFRecord files by number; see `open_files`."""

    def __init__(self, paths: list[str], parse: RecordParser, *, check: bool) -> None:
        self.where = paths[0] if len(paths) == 1 else f"{len(paths)} TFRecord files"
        self._paths = paths
        self._parse = parse
        self._check = check
        self._begins = [scan_offsets(path, load_checksum() if check else None) for path in paths]
        self._parts = ConcatIndex(len(begins) - 1 for begins in self._begins)
        self._files = PerProcess(OpenDescriptors, OpenDescriptors.close)

    def __len__(self) -> int:
        return len(self._parts)

    def read(self, index: int) -> Sample:
        """Return a record's sample."""
        part, number = self._parts.locate(index)
        path = self._paths[part]
        begin, end = (int(at) for at in self._begins[part][number : number + 2])
        length = end - begin - FRAME_NBYTES
        if length > self._parse.most:
            raise RecordError(path, begin, number, too_long_message(length, self._parse.most))
        found = self._files.get().read(path, begin, end - begin)
        if len(found) < end - begin:
            raise RecordError(path, begin, number, too_short_message(length, len(found)))
        checksum = load_checksum() if self._check else None
        stated = check_header(path, begin, number, found[: HEADER.size], checksum)
        if stated != length:
            raise RecordError(path, begin, number, f"it is {stated} bytes long, and was {length} when it was opened")
        record = found[HEADER.size : -FOOTER.size]
        if checksum is not None and checksum(record) != FOOTER.unpack_from(found, len(found) - FOOTER.size)[0]:
            raise RecordError(path, begin, number, "the checksum of its data is wrong")
        try:
            return self._parse.sample(record)
        except ValueError as error:
            raise RecordError(path, begin, number, str(error)) from error

    def close(self) -> None:
        """Close the files."""
        self._files.close()


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class TFRecordWriter:
    """Writes samples as tf.train.Example; see `features` for how. The file is gzipped if its name ends on .gz.

    Raises:
        SourceError: the schema is not supported, or the file cannot be made.
        ExtraError: google-crc32c is not installed.
    """

    def __init__(self, path: str, schema: Schema) -> None:
        self._marked = SchemaEncoder(schema)
        self._checksum = load_checksum()
        self._file = SequentialWriter(path)

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        record = self._marked.example(sample)
        length = len(record).to_bytes(8, "little")
        self._file.write(length + FOOTER.pack(self._checksum(length)))
        self._file.write(record)
        self._file.write(FOOTER.pack(self._checksum(record)))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
