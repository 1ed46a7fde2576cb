"""Token files: the integers of a whole corpus, one after another, and where its documents end.

    train.npy        NumPy's format, integers: [tokens], or [documents, tokens of each]
    train.bin        the integers and nothing else, little endian; `dtype=` says which, uint16 without it
    train.idx.npy    beside either: int64, where each document begins, counted in tokens, and where the last one ends

What a sample is:

    no documents known    windows of `length` tokens over all files, one every `step`; up to step - 1 tokens at the end,
                          and what a window lacks, are left out
    whole documents       `length=None`: each as long as it is
    cut documents         `pack=False`: pieces of at most `length`; every token once
    packed documents      `pack=True`: pieces of at most `length`, put together to sequences of `length` by "best fit,
                          longest first" (Ding et al., Fewer Truncations Improve Language Modeling, 2024), so that few
                          places stay empty. "documents" is 1, 2, ... where they lie and 0 where nothing does;
                          "positions" begins again at 0 in each: what an attention mask needs

`targets=True` adds the token that follows each: in windows from the file (so that windows take one token more); within
documents -100, which torch's cross_entropy leaves out, where a document ends.

Tokens are read, not mapped: a file that becomes shorter while it is read is an error, and not the process's end.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.feed.sources.base import PerProcess, Source
from penstock.feed.sources.sample import Errors, Sample, Schema, Selection, plain
from penstock.feed.sources.storage import Storage, is_remote

LENGTH = 1024
"""Of windows, where nothing says another."""

IGNORED = -100
"""A target that is none: torch's cross_entropy leaves it out."""

_MAGIC = b"\x93NUMPY"
_HEADER_NBYTES = 128
_PIECE = 1 << 22
_DTYPES = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def opened(
    paths: list[str],
    *,
    storage: Storage,
    fields: Selection,
    errors: Errors,
    length: int | None = None,
    dtype: str | None = None,
    documents: str | Sequence[str] | None = None,
    eos: int | None = None,
    pack: bool = True,
    step: int | None = None,
    targets: bool = False,
    as_dtype: str | None = None,
    max_record_nbytes: int = 1 << 30,
) -> Source:
    """Open token files as one source; see the module for what a sample is.

    Args:
        paths: .npy and .bin files; .idx.npy files among them are left out.
        storage: makes them local.
        fields: "tokens", "targets", "documents" and "positions", as far as samples have them.
        errors: for streams.
        length: tokens of a sample. None: whole documents where their places are known, else windows of 1024.
        dtype: of .bin files.
        documents: the file of documents' places, or one for each token file; found beside them where it is None.
        eos: the token that ends a document, instead of such a file.
        pack: whether documents are put together to full sequences.
        step: tokens from one window's beginning to the next one's; `length` where it is None.
        targets: whether samples have "targets".
        as_dtype: what tokens are given as: "int64" for an embedding. As the file has them where it is None.
        max_record_nbytes: a longer document is broken.

    Raises:
        SourceError: a file is no such file, or truncated, or its documents lie elsewhere.
        OptionError: options that make no sense.
    """
    for name, value in (("length", length), ("step", step)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} has to be 1 or more")
    for name, given in (("dtype", dtype), ("as_dtype", as_dtype)):
        if given is not None and given not in _DTYPES:
            raise OptionError(f"{name}={given!r} has to be one of {', '.join(_DTYPES)}")
    files = [path for path in paths if not path.endswith(".idx.npy")] or paths
    beside = _beside(files, documents, storage) if eos is None else None
    tokens = Tokens([_File.of(storage.local(path), dtype) for path in files], as_dtype)
    bounds = tokens.ends_at(eos) if eos is not None else tokens.documents(beside)
    give = _Give(fields, targets=targets, packed=bounds is not None and length is not None and pack)
    if bounds is None:
        length = length or LENGTH
        return Windows(tokens, length, step or length, give)
    if step is not None:
        raise OptionError("step= is for windows, and these files have documents")
    if length is None:
        return Documents(tokens, bounds[:-1], np.diff(bounds), bounds, give, max_record_nbytes)
    starts, sizes = pieces_of(bounds, length)
    if not pack:
        return Documents(tokens, starts, sizes, bounds, give, max_record_nbytes)
    return Packed(tokens, starts, sizes, bounds, length, give)


class _File:
    """A token file: where its integers are."""

    def __init__(self, path: str, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path = path
        self.start = start
        self.dtype = dtype
        self.shape = shape
        self.count = int(np.prod(shape, dtype=object))
        nbytes = os.stat(path).st_size
        if start + self.count * dtype.itemsize > nbytes:
            raise SourceError(
                f"{path} is truncated: {self.count} tokens of {dtype.name} take {self.count * dtype.itemsize} bytes, "
                f"and it has {nbytes - start}"
            )

    @classmethod
    def of(cls, path: str, dtype: str | None) -> _File:
        """Return what a file says of itself; `dtype` is for one that does not."""
        try:
            with open(path, "rb") as file:
                head = file.read(10_000)
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error
        if head.startswith(_MAGIC):
            return cls(path, *_npy(head, path))
        if path.lower().endswith(".npy"):
            raise SourceError(f"{path} is no file of NumPy's format; rename it to .bin if it holds bare integers")
        kind = np.dtype(dtype or "uint16").newbyteorder("<")
        nbytes = os.stat(path).st_size
        if nbytes % kind.itemsize:
            raise SourceError(f"{path} has {nbytes} bytes, which are no whole number of {kind.name}; say dtype=")
        return cls(path, 0, kind, (nbytes // kind.itemsize,))


def _npy(head: bytes, path: str) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Return where the data of a .npy file begin, their dtype and shape. Its header is Python, which is not run."""
    wide = 2 if head[6:7] == b"\x01" else 4
    nbytes = int.from_bytes(head[8 : 8 + wide], "little")
    start = 8 + wide + nbytes
    header = head[8 + wide : start].decode("latin1")
    kind = re.search(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[a-zA-Z]\d+)['"]""", header)
    fortran = re.search(r"""['"]fortran_order['"]\s*:\s*(True|False)""", header)
    shape = re.search(r"""['"]shape['"]\s*:\s*\(([\d,\s]*)\)""", header)
    if len(head) < start or kind is None or fortran is None or shape is None:
        raise SourceError(f"{path} has no header of NumPy's format, with an array's dtype and shape: {header[:100]!r}")
    if not re.fullmatch(r"[<>|=]?[iu][1248]", kind[1]):
        raise SourceError(f"{path} holds {kind[1]}; tokens have to be integers")
    sizes = tuple(int(size[:20]) for size in re.findall(r"\d+", shape[1]))
    if len(sizes) not in (1, 2) or (len(sizes) == 2 and (fortran[1] == "True" or sizes[1] == 0)):
        shown = header.strip()[:80]
        raise SourceError(f"{path} has {len(sizes)} dimensions; tokens have 1, or 2 in C order: {shown}")
    return start, np.dtype(kind[1]), sizes


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()


class Tokens:
    """All tokens of some files, as one long row."""

    def __init__(self, files: list[_File], as_dtype: str | None) -> None:
        self.files = files
        kinds = {file.dtype.newbyteorder("=") for file in files}
        self.dtype = np.dtype(as_dtype) if as_dtype else np.result_type(*kinds)
        if self.dtype.kind not in "iu":
            raise SourceError(
                f"no integer holds both {' and '.join(sorted(kind.name for kind in kinds))}; say as_dtype="
            )
        narrow = [kind.name for kind in kinds if not np.can_cast(kind, self.dtype)]
        if narrow:
            raise OptionError(f"as_dtype={as_dtype!r} does not hold every {narrow[0]}")
        self.where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        self._ends = np.cumsum([file.count for file in files])
        self._open: PerProcess[dict[int, int]] = PerProcess(dict, _close_all)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of tokens `start` to `stop`.

        Raises:
            RecordError: a file has become shorter.
        """
        number = int(np.searchsorted(self._ends, start, "right")) if len(self.files) > 1 else 0
        if number < len(self.files) and stop <= self._ends[number]:
            return self._read(number, start, stop).astype(self.dtype, copy=False)
        found = np.empty(max(0, stop - start), self.dtype)
        at = start
        while at < stop:
            end = min(stop, int(self._ends[number]))
            found[at - start : end - start] = self._read(number, at, end)
            at, number = end, number + 1
        return found

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def ends_at(self, eos: int) -> np.ndarray:
        """Return where documents begin that end with the token `eos`, or where a file ends, and where the last ends."""
        pieces = ((at, self.take(at, min(at + _PIECE, len(self)))) for at in range(0, len(self), _PIECE))
        found = [np.flatnonzero(piece == eos) + at + 1 for at, piece in pieces]
        return np.unique(np.concatenate([np.zeros(1, np.int64), self._ends, *found]))

    def documents(self, beside: list[str] | None) -> np.ndarray | None:
        """Return where documents begin, and where the last one ends; None where nothing says it."""
        found = []
        before = 0
        for number, file in enumerate(self.files):
            if beside is not None:
                bounds = _bounds(beside[number], file)
            elif len(file.shape) == 2:
                bounds = np.arange(file.shape[0] + 1, dtype=np.int64) * file.shape[1]
            else:
                return None
            found.append((bounds if number == 0 else bounds[1:]) + before)
            before += file.count
        return np.concatenate(found)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        file = self.files[number]
        before = int(self._ends[number]) - file.count
        found = np.empty(stop - start, file.dtype)
        offset = file.start + (start - before) * file.dtype.itemsize
        opened = self._open.get()
        try:
            descriptor = opened.get(number)
            if descriptor is None:
                descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                if opened.setdefault(number, descriptor) != descriptor:  # another thread was faster
                    os.close(descriptor)
                    descriptor = opened[number]
            there = os.preadv(descriptor, [found.data], offset) if found.nbytes else 0
        except OSError as error:
            raise RecordError(file.path, offset, f"token {start}", str(error)) from error
        if there < found.nbytes:
            raise RecordError(file.path, offset, f"token {start}", "the file has become shorter since it was opened")
        return found


def _beside(files: list[str], documents: str | Sequence[str] | None, storage: Storage) -> list[str] | None:
    """Return the files of documents' places; None without."""
    if documents is not None:
        named = [documents] if isinstance(documents, str) else list(documents)
        if len(named) != len(files):
            raise OptionError(f"{len(files)} token files need as many files of documents, not {len(named)}")
        return [storage.local(path) for path in named]
    found = [index_path(path) for path in files]
    if all(not is_remote(path) and os.path.exists(path) for path in found):
        return found
    return None


def index_path(path: str) -> str:
    """Return where the documents' places of a token file are.

    >>> index_path("data/train.bin")
    'data/train.idx.npy'
    """
    return re.sub(r"\.(npy|bin)$", "", path) + ".idx.npy"


def _bounds(path: str, of: _File) -> np.ndarray:
    index = _File.of(path, None)
    if len(index.shape) != 1 or index.count == 0:
        raise SourceError(f"{path} has the shape {index.shape}; it has to be a row of at least one place")
    bounds = np.fromfile(path, index.dtype, index.count, offset=index.start).astype(np.int64)
    if len(bounds) < index.count:
        raise SourceError(f"{path} has become shorter")
    if bounds[0] != 0 or bounds[-1] != of.count or (np.diff(bounds) < 0).any():
        raise SourceError(f"{path} has to go up from 0 to the {of.count} tokens of {of.path}; it goes to {bounds[-1]}")
    return bounds


def pieces_of(bounds: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most `length`: return where they begin, and their sizes. Empty ones give none.

    >>> starts, sizes = pieces_of(np.array([0, 5, 5, 7]), 2)
    >>> starts.tolist(), sizes.tolist()
    ([0, 2, 4, 5], [2, 2, 1, 2])
    """
    counts = -(-np.diff(bounds) // length)
    document = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = bounds[document] + within * length
    return starts, np.minimum(length, bounds[document + 1] - starts)


class _Give:
    """Which fields samples have."""

    def __init__(self, fields: Selection, *, targets: bool, packed: bool) -> None:
        there = ["tokens", *(["targets"] if targets else []), *(["documents", "positions"] if packed else [])]
        self.names = fields.names(there, "this token source")
        self.targets = targets

    def sample(self, **values: np.ndarray) -> Sample:
        return {name: values[own] for name, own in self.names.items()}


class Windows(Source):
    """Tokens `step * i` to `step * i + length` of all files."""

    def __init__(self, tokens: Tokens, length: int, step: int, give: _Give) -> None:
        self.where = tokens.where
        self._tokens = tokens
        self._length = length
        self._step = step
        self._give = give
        self._count = max(0, (len(tokens) - length - give.targets) // step + 1)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Sample:
        """Return a window."""
        start = index * self._step
        if not self._give.targets:
            return self._give.sample(tokens=self._tokens.take(start, start + self._length))
        found = self._tokens.take(start, start + self._length + 1)
        return self._give.sample(tokens=found[:-1], targets=found[1:])

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()


class Documents(Source):
    """Documents, or pieces of them."""

    def __init__(
        self, tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, bounds: np.ndarray, give: _Give, most_nbytes: int
    ) -> None:
        self.where = tokens.where
        self.lengths = sizes
        """Of each: what `TokenBatches` asks for."""
        self._tokens = tokens
        self._starts = starts
        self._ends = (
            bounds[np.searchsorted(bounds, starts, "right").clip(max=len(bounds) - 1)] if give.targets else None
        )
        self._give = give
        self._most_nbytes = most_nbytes

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Sample:
        """Return a document.

        Raises:
            RecordError: it is longer than `max_record_nbytes`.
        """
        start, size = int(self._starts[index]), int(self.lengths[index])
        if size * self._tokens.dtype.itemsize > self._most_nbytes:
            raise RecordError(
                self.where, -1, index, f"{size} tokens take more than max_record_nbytes={self._most_nbytes}"
            )
        if self._ends is None:
            return self._give.sample(tokens=self._tokens.take(start, start + size))
        tokens, targets = _with_targets(self._tokens, start, size, int(self._ends[index]))
        return self._give.sample(tokens=tokens, targets=targets)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()


def _with_targets(tokens: Tokens, start: int, size: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `size` tokens from `start` on, and what follows each in the document that ends at `end`."""
    found = tokens.take(start, min(start + size + 1, end))
    targets = np.full(size, IGNORED, np.int64)
    targets[: len(found) - 1] = found[1:]
    return found[:size], targets


class Packed(Source):
    """Sequences of `length`, each of several documents."""

    def __init__(
        self,
        tokens: Tokens,
        starts: np.ndarray,
        sizes: np.ndarray,
        bounds: np.ndarray,
        length: int,
        give: _Give,
    ) -> None:
        self.where = tokens.where
        self._tokens = tokens
        self._length = length
        self._give = give
        order, self._cuts = packed(sizes, length)
        self._starts = starts[order]
        self._sizes = sizes[order]
        self._ends = bounds[np.searchsorted(bounds, self._starts, "right")] if len(order) else self._starts

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def read(self, index: int) -> Sample:
        """Return a sequence."""
        length = self._length
        tokens = np.zeros(length, self._tokens.dtype)
        targets = np.full(length, IGNORED, np.int64) if self._give.targets else tokens
        documents = np.zeros(length, np.int32)
        positions = np.zeros(length, np.int32)
        at = 0
        first, last = int(self._cuts[index]), int(self._cuts[index + 1])
        for number, piece in enumerate(range(first, last), 1):
            start, size = int(self._starts[piece]), int(self._sizes[piece])
            end = at + size
            if self._give.targets:
                tokens[at:end], targets[at:end] = _with_targets(self._tokens, start, size, int(self._ends[piece]))
            else:
                tokens[at:end] = self._tokens.take(start, start + size)
            documents[at:end] = number
            positions[at:end] = np.arange(size, dtype=np.int32)
            at = end
        return self._give.sample(tokens=tokens, targets=targets, documents=documents, positions=positions)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()


def packed(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces together to sequences of at most `length`: best fit, longest first.

    Pieces of one size are alike, and so are sequences with one gap: what is looked at are sizes and gaps, so that time
    grows with the number of sequences and of sizes, hardly with that of pieces.

    Args:
        sizes: of the pieces, each from 1 to `length`.
        length: of a sequence.

    Returns:
        The pieces' numbers, sequence by sequence, and where in them each sequence begins, and the end.

    >>> order, cuts = packed(np.array([3, 1, 2, 4]), 4)
    >>> [order[a:b].tolist() for a, b in zip(cuts[:-1], cuts[1:])]
    [[0, 1], [2], [3]]
    """
    by_size = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(sizes), np.int64)
    with_gap: dict[int, list[np.ndarray]] = {}  # which sequences have so much room
    gaps: list[int] = []  # in order

    def note(gap: int, sequences: np.ndarray) -> None:
        if gap and len(sequences):
            if not with_gap.setdefault(gap, []):
                bisect.insort(gaps, gap)
            with_gap[gap].append(sequences)

    made = at = 0
    kinds, counts = np.unique(-sizes, return_counts=True)
    for size, count in zip((-kinds).tolist(), counts.tolist(), strict=True):
        last = at + count
        while at < last:
            smallest = bisect.bisect_left(gaps, size)
            gap = gaps[smallest] if smallest < len(gaps) else length
            each = gap // size
            wanted = -(-(last - at) // each)
            if smallest < len(gaps):
                sequences = with_gap[gap].pop()
                if not with_gap[gap]:
                    gaps.pop(smallest)
                note(gap, sequences[wanted:])
                sequences = sequences[:wanted]
            else:
                sequences = np.arange(made, made + wanted)
                made += wanted
            placed = min(last - at, len(sequences) * each)
            sequence_of[by_size[at : at + placed]] = np.repeat(sequences, each)[:placed]
            full = placed // each
            note(gap - each * size, sequences[:full])
            note(gap - (placed - full * each) * size, sequences[full:])
            at += placed
    _, firsts = np.unique(sequence_of, return_index=True)
    place = np.empty(made, np.int64)
    place[np.argsort(firsts)] = np.arange(made)
    sequence_of = place[sequence_of]
    return np.argsort(sequence_of, kind="stable"), np.append(0, np.cumsum(np.bincount(sequence_of, minlength=made)))


class Writer:
    """Writes a new token file, and beside it where its documents lie: each sample is one.

    Args:
        path: .npy, or .bin.
        schema: one field "tokens", integers in one dimension.
        dtype: of a .bin file, if it is not uint16; who opens it has to say it too.

    Raises:
        SourceError: the schema is another one, or the file cannot be made.
    """

    def __init__(self, path: str, schema: Schema, *, dtype: str | None = None) -> None:
        why = unfit(schema)
        if why:
            raise SourceError(f"{path}: {why}")
        self._kind = np.dtype(schema["tokens"].dtype)
        self._is_bare = path.lower().endswith(".bin")
        if self._is_bare and self._kind.name != (dtype or "uint16"):
            raise SourceError(
                f"{path}: a .bin file cannot say that its tokens are {self._kind.name}; write .npy, or say dtype="
            )
        self._path = path
        self._sizes = [0]
        try:
            self._file = open(path, "wb", 1 << 20)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise SourceError(f"{path} cannot be written: {error}") from error
        if not self._is_bare:
            self._file.write(bytes(_HEADER_NBYTES))

    def write(self, sample: Sample) -> None:
        """Add a document.

        Raises:
            SourceError: the sample does not fit the schema.
        """
        tokens = plain(sample["tokens"]) if sample.keys() == {"tokens"} else None
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.newbyteorder("=") != self._kind:
            raise SourceError(
                f"{self._path}: a sample has to have tokens of {self._kind.name} in one dimension, and nothing else"
            )
        self._file.write(np.ascontiguousarray(tokens, self._kind.newbyteorder("<")).data)
        self._sizes.append(len(tokens))

    def close(self) -> None:
        """Finish both files."""
        bounds = np.cumsum(self._sizes, dtype=np.int64)
        if not self._is_bare:
            self._file.seek(0)
            self._file.write(_npy_header(self._kind, int(bounds[-1])))
        self._file.close()
        _write_index(self._path, bounds)


def _npy_header(kind: np.dtype[Any], count: int) -> bytes:
    """Return NumPy's header of a row, filled up to 128 bytes; version 1.0."""
    text = f"{{'descr': '{kind.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({count},), }}"
    room = _HEADER_NBYTES - len(_MAGIC) - 4
    return _MAGIC + b"\x01\x00" + room.to_bytes(2, "little") + f"{text:<{room - 1}}\n".encode()


def _write_index(path: str, bounds: np.ndarray) -> None:
    with open(index_path(path), "wb") as file:
        file.write(_npy_header(np.dtype(np.int64), len(bounds)) + bounds.astype("<i8").tobytes())


def unfit(schema: Schema) -> str:
    """Return why samples would not come back from a token file as they are; "" if they would.

    >>> from penstock.feed.sources.sample import Field
    >>> unfit({"tokens": Field("array", "uint16", (None,))})
    ''
    """
    field = schema.get("tokens")
    if len(schema) != 1 or field is None:
        return f"a token file has one field, 'tokens', not {', '.join(map(repr, schema)) or 'none'}"
    if field.kind != "array" or len(field.shape) != 1 or field.dtype not in _DTYPES:
        return f"'tokens' are {field.words()}, and have to be integers in one dimension"
    return ""


def joined(parts: list[str], path: str) -> None:
    """Make one file of several that Writer made, in their order; and one of where their documents lie."""
    is_bare = path.lower().endswith(".bin")
    kind = np.dtype("<u2") if is_bare else _File.of(parts[0], None).dtype
    bounds, before = [np.zeros(1, np.int64)], 0
    with open(path, "wb") as whole:
        if not is_bare:
            whole.write(bytes(_HEADER_NBYTES))
        for part in parts:
            index = _File.of(index_path(part), None)
            own = np.fromfile(index.path, "<i8", offset=index.start)
            bounds.append(own[1:] + before)
            before += int(own[-1])
            with open(part, "rb") as file:
                file.seek(0 if is_bare else _HEADER_NBYTES)
                while piece := file.read(1 << 20):
                    whole.write(piece)
        places = np.concatenate(bounds)
        if not is_bare:
            whole.seek(0)
            whole.write(_npy_header(kind, int(places[-1])))
    _write_index(path, places)
