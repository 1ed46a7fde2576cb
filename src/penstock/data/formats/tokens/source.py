"""Token files: the integers of a whole corpus, one after another, and where its documents end.

    train.npy        NumPy's format, integers: [tokens], or [documents, tokens of each]
    train.bin        the integers and nothing else, little endian, of type `dtype=`; or what llm.c or Megatron wrote:
                     token_files.py
    train.idx        beside a .bin: Megatron's index, of its dtype and documents
    train.idx.npy    beside either: int64, where each document begins, counted in tokens, and where the last one ends

What a sample is:

    no documents known    windows of `length` tokens over all files, one every `step`; up to step - 1 tokens at the end,
                          and what a window lacks, are left out. With `pack=False` each file is a document, to be cut
    whole documents       `length=None`: each as long as it is
    cut documents         `pack=False`: pieces of at most `length`; every token once
    packed documents      `pack=True`: pieces of at most `length`, put together to sequences of `length` by "best fit,
                          longest first" (Ding et al., Fewer Truncations Improve Language Modeling, 2024), so that few
                          places stay empty. "documents" is 1, 2, ... where they lie and 0 where nothing does;
                          "positions" begins again at 0 in each: what an attention mask needs

`targets=True` adds the token that follows each: in windows from the file (so that windows take one token more); within
documents -100, which torch's cross_entropy leaves out, where a document ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.errors import OptionError, RecordError, SourceError
from penstock.data.formats.npy_header import write_header
from penstock.data.formats.tokens.packing import Pieces, pack_documents, split_documents
from penstock.data.formats.tokens.token_files import (
    DTYPES,
    HEADER_NBYTES,
    TokenFile,
    Tokens,
    find_document_indexes,
    write_index,
)
from penstock.data.schema import Errors, Sample, Schema, Selection, plain
from penstock.data.source import Source
from penstock.data.storage.storage import Storage

LENGTH = 1024
"""Of windows, by default."""

IGNORED = -100
"""The target where there is none: torch's cross_entropy ignores it."""


def open_files(
    paths: list[str],
    storage: Storage,
    fields: Selection,
    errors: Errors,
    *,
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
        fields: "tokens", "targets", "documents" and "positions", those that samples have.
        errors: unused: reading a broken sample raises RecordError.
        length: tokens of a sample. None: whole documents where their places are known, else windows of 1024.
        dtype: of .bin files in which, or beside which, nothing says it.
        documents: the file of documents' places, or one for each token file; found beside them where it is None.
        eos: the token that ends a document, instead of such a file.
        pack: whether documents are packed to full sequences; without documents, whether tokens at the end that fill
            none are left out.
        step: tokens from one window's beginning to the next one's; `length` where it is None.
        targets: whether samples have "targets".
        as_dtype: the dtype of samples: "int64" for an embedding. None keeps that of the file.
        max_record_nbytes: a longer document is broken.

    Raises:
        SourceError: a file is of another format, or truncated, or its documents end elsewhere; or nothing says what its
            integers are; or there are too few for one window.
        OptionError: a number is not positive, a dtype is unknown, or `step` is set for documents.
    """
    for name, value in (("length", length), ("step", step)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} has to be 1 or more")
    for name, given in (("dtype", dtype), ("as_dtype", as_dtype)):
        if given is not None and given not in DTYPES:
            raise OptionError(f"{name}={given!r} has to be one of {', '.join(DTYPES)}")
    files = [path for path in paths if not path.endswith(".idx.npy")] or paths
    places = find_document_indexes(files, documents, storage) if eos is None else None
    tokens = Tokens([TokenFile.open(path, dtype, storage) for path in files], as_dtype)
    bounds = tokens.ends_at(eos) if eos is not None else tokens.documents(places)
    there = ["tokens", *(["targets"] if targets else [])]
    if bounds is not None and length is not None and pack:
        there += ["documents", "positions"]
    names = fields.names(there, "this token source")
    if bounds is None:
        length = length or LENGTH
        if pack or step is not None:
            return Windows(tokens, names, length, step or length, targets=targets)
        bounds = tokens.bounds
    if step is not None:
        raise OptionError("step= is for windows, and these files have documents")
    pieces = split_documents(bounds, length)
    if length is None or not pack:
        return Documents(tokens, names, pieces, max_record_nbytes, targets=targets)
    return Packed(tokens, names, pieces, length, targets=targets)


class _TokenSource(Source):
    """Samples of some files' tokens: {name in the sample: field} in `names`."""

    def __init__(self, tokens: Tokens, names: dict[str, str], *, targets: bool) -> None:
        self.where = tokens.where
        self._tokens = tokens
        self._names = names
        self._has_targets = targets

    def read_paths(self) -> Sequence[str]:
        return [file.path for file in self._tokens.files]

    def close(self) -> None:
        self._tokens.close()

    def _sample(self, **values: np.ndarray | None) -> Sample:
        return {name: values[own] for name, own in self._names.items()}


class Windows(_TokenSource):
    """Tokens `step * i` to `step * i + length` of all files."""

    def __init__(self, tokens: Tokens, names: dict[str, str], length: int, step: int, *, targets: bool) -> None:
        super().__init__(tokens, names, targets=targets)
        self._length = length
        self._step = step
        self._count = max(0, (len(tokens) - length - targets) // step + 1)
        if not self._count and len(tokens):
            raise SourceError(
                f"{self.where}: {len(tokens)} tokens in all, and a window takes {length + targets}; choose a "
                "smaller length=, or pass pack=False for what there is"
            )

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Sample:
        """Return a window."""
        start = index * self._step
        if not self._has_targets:
            return self._sample(tokens=self._tokens.take(start, start + self._length))
        found = self._tokens.take(start, start + self._length + 1)
        return self._sample(tokens=found[:-1], targets=found[1:])


class _PieceSource(_TokenSource):
    """Samples of documents, or of pieces of them."""

    def __init__(self, tokens: Tokens, names: dict[str, str], pieces: Pieces, *, targets: bool) -> None:
        super().__init__(tokens, names, targets=targets)
        self._pieces = pieces

    def _piece(self, number: int, size: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a piece's tokens, and what follows each in its document: None without targets."""
        start = int(self._pieces.starts[number])
        if not self._has_targets:
            return self._tokens.take(start, start + size), None
        found = self._tokens.take(start, min(start + size + 1, int(self._pieces.ends[number])))
        targets = np.full(size, IGNORED, np.int64)
        targets[: len(found) - 1] = found[1:]
        return found[:size], targets


class Documents(_PieceSource):
    """Documents, or pieces of them."""

    def __init__(
        self, tokens: Tokens, names: dict[str, str], pieces: Pieces, most_nbytes: int, *, targets: bool
    ) -> None:
        super().__init__(tokens, names, pieces, targets=targets)
        self.lengths = pieces.sizes
        """Of each: what `TokenBatches` asks for."""
        self._most_nbytes = most_nbytes

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int) -> Sample:
        """Return a document."""
        size = int(self.lengths[index])
        if size * self._tokens.dtype.itemsize > self._most_nbytes:
            raise RecordError(
                self.where, -1, index, f"{size} tokens take more than max_record_nbytes={self._most_nbytes}"
            )
        tokens, targets = self._piece(index, size)
        return self._sample(tokens=tokens, targets=targets)


class Packed(_PieceSource):
    """Sequences of `length`, each of several documents."""

    def __init__(self, tokens: Tokens, names: dict[str, str], pieces: Pieces, length: int, *, targets: bool) -> None:
        order, self._cuts = pack_documents(pieces.sizes, length)
        super().__init__(tokens, names, Pieces(*(one[order] for one in pieces)), targets=targets)
        self._length = length

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def read(self, index: int) -> Sample:
        """Return a sequence."""
        length = self._length
        tokens = np.zeros(length, self._tokens.dtype)
        targets = np.full(length, IGNORED, np.int64) if self._has_targets else tokens
        documents = np.zeros(length, np.int32)
        positions = np.zeros(length, np.int32)
        at = 0
        first, last = int(self._cuts[index]), int(self._cuts[index + 1])
        for number, piece in enumerate(range(first, last), 1):
            found, following = self._piece(piece, int(self._pieces.sizes[piece]))
            end = at + len(found)
            tokens[at:end] = found
            if following is not None:
                targets[at:end] = following
            documents[at:end] = number
            positions[at:end] = np.arange(len(found), dtype=np.int32)
            at = end
        return self._sample(tokens=tokens, targets=targets, documents=documents, positions=positions)


class TokenWriter:
    """Writes a new token file, and beside it where its documents lie: each sample is one.

    Args:
        path: .npy; a .bin file is read, but not written, as nothing in it says what its integers are.
        schema: one field "tokens", integers in one dimension.

    Raises:
        SourceError: the schema is another one, or the file cannot be made.
    """

    def __init__(self, path: str, schema: Schema) -> None:
        why = why_unsupported(schema)
        if why or path.lower().endswith(".bin"):
            raise SourceError(f"{path}: {why or 'a .bin file does not store what its integers are; write .npy'}")
        self._kind = np.dtype(schema["tokens"].dtype)
        self._path = path
        self._sizes = [0]
        try:
            self._file = open(path, "wb", 1 << 20)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise SourceError(f"{path} cannot be written: {error}") from error
        self._file.write(bytes(HEADER_NBYTES))

    def write(self, sample: Sample) -> None:
        """Add a document."""
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
        self._file.seek(0)
        self._file.write(write_header(self._kind, (int(bounds[-1]),)))
        self._file.close()
        write_index(self._path, bounds)


def why_unsupported(schema: Schema) -> str:
    """Return why samples would not come back from a token file as they are; "" if they would.

    >>> from penstock.data.schema import Field
    >>> why_unsupported({"tokens": Field("array", "uint16", (None,))})
    ''
    """
    field = schema.get("tokens")
    if len(schema) != 1 or field is None:
        return f"a token file has one field, 'tokens', not {', '.join(map(repr, schema)) or 'none'}"
    if field.kind != "array" or len(field.shape) != 1 or field.dtype not in DTYPES:
        return f"'tokens' are {field.words()}, and have to be integers in one dimension"
    return ""
