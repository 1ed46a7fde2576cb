"""Tar shards: members of an archive that share a name are a sample, as WebDataset has it.

fields.py describes how members become samples, and headers.py the archive itself, which may be gzipped. Nothing is ever
extracted to disk: a path in an archive is only a name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.tar.fields import (
    KEY,
    BySuffix,
    Decode,
    encode_member,
    lacks_suffix,
    member_suffix,
    split_name,
    to_comment,
    why_unsupported,
)
from penstock.data.formats.tar.headers import BLOCK_NBYTES, END, Member, header, members, note
from penstock.data.schema import Errors, Sample, Schema, Selection, fitted
from penstock.data.storage.sequential_reader import SequentialReader
from penstock.data.storage.sequential_writer import SequentialWriter
from penstock.data.storage.storage import Storage
from penstock.data.stream import Shard, Stream

_LINK = (
    "its member {!r} is a link to {!r}, and has no data; make the archive with --dereference --hard-dereference, or "
    "choose other members with fields="
)


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
    decode: Decode = True,
    parse_json: bool = False,
    max_record_nbytes: int = 1 << 30,
) -> TarStream:
    """Open tar shards.

    Args:
        paths: the archives.
        storage: opens them.
        fields: which members a sample gets, by their suffixes ("jpg", or the first that is there of "jpg;png"), or by
            the fields' names in archives that penstock wrote. `__key__` is the sample's name.
        errors: what to do with broken samples.
        decode: decode members to integers, text and arrays by their suffix; "images" decodes images too, to
            uint8[3, height, width]; False leaves all as bytes.
        parse_json: parse JSON; else it is text.
        max_record_nbytes: a larger sample, with 512 bytes more for each member, is broken.

    Raises:
        SourceError: an archive cannot be read.
        OptionError: `decode` is none of True, False and "images".
    """
    if decode not in (False, True, "images"):
        raise OptionError(f"decode={decode!r} is none of True, False and 'images'")
    by_suffix = BySuffix(fields=fields, decode=decode, parse_json=parse_json)
    return TarStream(paths, storage, errors, by_suffix, most=max_record_nbytes)


@dataclass
class _Gathered:
    """The members of one sample, as far as they have been read."""

    key: str
    offset: int
    is_wanted: bool
    members: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    fault: str = ""


class TarStream(Stream):
    """Tar shards as a stream; see `open_files`."""

    def __init__(self, paths: list[str], storage: Storage, errors: Errors, by_suffix: BySuffix, *, most: int) -> None:
        super().__init__([Shard(path) for path in paths], errors=errors)
        self.where = paths[0] if len(paths) == 1 else f"{len(paths)} tar files"
        self._storage = storage
        self._by_suffix = by_suffix
        self._most = most

    def read(self, shard: Shard, first: int, step: int) -> Iterator[Sample | RecordError]:
        """Yield every step-th sample; of the others nothing but the headers is read."""
        with closing(SequentialReader(self._storage, shard.name)) as pieces:
            by = self._by_suffix
            current: _Gathered | None = None
            number, lacking, nameless = -1, 0, ""
            for member in members(pieces):
                if isinstance(member, str):
                    by = self._of_archive(shard.name, member)
                    continue
                parts = split_name(member.name) if member else None
                if member and not parts:
                    if lacks_suffix(member.name):
                        lacking, nameless = lacking + 1, nameless or member.name
                    continue
                if current and (not parts or parts[0] != current.key):
                    if current.is_wanted:
                        yield _decode_sample(shard.name, current, by)
                    current = None
                if not member or not parts:
                    by = self._by_suffix
                    continue
                pieces.key, suffix = parts
                if current is None:
                    number += 1
                    is_wanted = number >= first and (number - first) % step == 0
                    current = _Gathered(parts[0], member.offset, is_wanted)
                if current.is_wanted and by.wants(suffix):
                    self._gather(pieces, member, suffix, current)
            if lacking:
                reason = (
                    f"{lacking} members have no suffix, which says what a member is and which belong to "
                    "one sample: rename them, as in 0001.jpg and 0001.cls"
                )
                if number < 0:
                    raise RecordError(shard.name, 0, nameless, reason)
                warnings.warn(f"left out: {nameless!r} ... of {shard.name}: {reason}", stacklevel=2)

    def _of_archive(self, path: str, comment: str) -> BySuffix:
        try:
            return self._by_suffix.of_archive(comment) if self._by_suffix.decode else self._by_suffix
        except SourceError as error:
            raise RecordError(path, 0, "of its fields", str(error)) from error

    def _gather(self, pieces: SequentialReader, member: Member, suffix: str, current: _Gathered) -> None:
        current.nbytes += BLOCK_NBYTES + member.nbytes  # with its header: millions of empty ones take memory, too
        if member.link:
            current.fault = current.fault or _LINK.format(member.name, member.link)
        elif suffix in current.members:
            current.fault = current.fault or f"two of its members are {member.name!r}"
        elif current.nbytes > self._most:
            current.fault = (
                current.fault
                or f"its members have {current.nbytes} bytes; {self._most} are the most (max_record_nbytes)"
            )
        else:
            current.members[suffix] = pieces.take(member.nbytes)


def _decode_sample(path: str, gathered: _Gathered, by: BySuffix) -> Sample | RecordError:
    if gathered.fault:
        return RecordError(path, gathered.offset, gathered.key, gathered.fault)
    try:
        return by.sample(gathered.key, gathered.members)
    except SourceError as error:
        return RecordError(path, gathered.offset, gathered.key, str(error))


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────


class TarWriter:
    """Writes samples as members; see fields.py for how. The archive is gzipped if its name ends on .gz or .tgz.

    Archives of the same samples are the same, byte for byte. A text field `__key__` names its sample; without it keys
    are numbers.

    Args:
        path: the archive.
        schema: of the samples.
        extensions: of fields of bytes, in place of "bin": {"image": "jpg"}.

    Raises:
        SourceError: the schema is not supported, or the archive cannot be made.
    """

    def __init__(self, path: str, schema: Schema, *, extensions: Mapping[str, str] | None = None) -> None:
        given = extensions or {}
        self._schema = schema
        self._suffixes = {name: member_suffix(name, one, given.get(name, "bin")) for name, one in schema.items()}
        why = why_unsupported(schema, self._suffixes)
        if why:
            raise SourceError(f"this cannot be written as a tar archive: {why}")
        self._last_key = ""
        self._count = 0
        self._file = SequentialWriter(path)
        self._file.write(note(to_comment(self._suffixes)))

    def write(self, sample: Sample) -> None:
        """Add a sample."""
        sample = fitted(self._schema, sample, "this archive")
        key = sample.pop(KEY, None)
        key = f"{self._count:09d}" if key is None else self._checked(key)
        for name, value in sample.items():
            data = encode_member(self._schema[name], value)
            self._file.write(header(f"{key}.{self._suffixes[name]}", len(data)))
            self._file.write(data)
            self._file.write(bytes(-len(data) % BLOCK_NBYTES))
        self._count += 1

    def _checked(self, key: str) -> str:
        leads_out = key.startswith("/") or ".." in key.split("/")  # of the folder that the archive is unpacked in
        if leads_out or split_name(f"{key}.x") != (key, "x") or not key.isprintable() or key == self._last_key:
            raise SourceError(
                f"{KEY} {key!r} cannot name a sample in an archive: it has to be printable, without a dot in its last "
                f"part, without .. and a / at its beginning, not __NAME__, and another one than that before it; "
                f"without {KEY} samples are numbered"
            )
        self._last_key = key
        return key

    def close(self) -> None:
        """Finish the archive."""
        self._file.write(END)
        self._file.close()
