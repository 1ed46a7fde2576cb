"""`Tokenized`: text → tokens on the fly, by a tokenizer file of the `tokenizers` package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from penstock.core.errors import OptionError, SourceError
from penstock.core.per_process import PerProcess
from penstock.data.optional import need
from penstock.data.schema import Sample

_PARALLELISM = "TOKENIZERS_PARALLELISM"


class Tokenized:
    """Tokenizes a field of text, as the function of `map`: `source.map(Tokenized("tokenizer.json"))`.

    Works on sources and streams, and on anything whose samples are dicts. Each process reads the tokenizer file for
    itself, when it first needs it; threads share it. Texts are tokenized one by one: with the workers side by side, a
    batch at a time was no faster. In a worker process the package's own threads are off (TOKENIZERS_PARALLELISM=false),
    unless the environment sets it: there are workers enough for all cores.

    Args:
        tokenizer: the file, as `tokenizers.Tokenizer.save` writes it (tokenizer.json).
        text: the field that holds the text; samples come without it unless `keep_text`.
        tokens: the field that the tokens go to.
        max_length: the most tokens of a sample; the rest of the text is cut off, not the special tokens behind it.
        special_tokens: whether the tokenizer adds those of its model, as [CLS] and [SEP].
        eos: a token's name, as in `"<|endoftext|>"`, that is added behind the text (and is not cut off).
        dtype: of the tokens.
        keep_text: leave the text in the sample.

    Raises:
        ExtraError: the package `tokenizers` is not installed; when the first sample is made.
        SourceError: the file is no tokenizer; a sample has no such field, or it is no text.
        OptionError: a dtype that holds no integers, `max_length` below 1, or a token that the tokenizer does not have.

    Example:
        >>> import pathlib
        >>> import tempfile
        >>> import tokenizers
        >>> words = tokenizers.models.WordLevel({"a": 0, "cat": 1, "?": 2}, unk_token="?")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tokenizers.Tokenizer(words).save(f"{folder}/tokenizer.json")
        ...     Tokenized(f"{folder}/tokenizer.json")({"text": "cat", "label": 3})
        {'label': 3, 'tokens': array([1])}
    """

    def __init__(
        self,
        tokenizer: str | os.PathLike[str],
        *,
        text: str = "text",
        tokens: str = "tokens",
        max_length: int | None = None,
        special_tokens: bool = True,
        eos: str | None = None,
        dtype: str = "int64",
        keep_text: bool = False,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise OptionError(f"max_length={max_length} has to be 1 or more")
        if np.dtype(dtype).kind not in "iu":
            raise OptionError(f"dtype={dtype!r} has to be one of integers")
        path = os.path.abspath(tokenizer)
        if not os.path.exists(path):
            raise SourceError(f"there is no file {path!r}")
        self._text = text
        self._tokens = tokens
        self._max_length = max_length
        self._special_tokens = special_tokens
        self._dtype = dtype
        self._keep_text = keep_text
        self._tokenizer: PerProcess[tuple[Any, list[int]]] = PerProcess(
            partial(_load_tokenizer, path, eos, dtype, max_length)
        )

    def __call__(self, sample: Mapping[str, Any]) -> Sample:
        """Return the sample with tokens: an array of `dtype`, in one dimension."""
        value = sample.get(self._text)
        if not isinstance(value, str):
            what = "no such field" if self._text not in sample else type(value).__qualname__
            raise SourceError(f"text={self._text!r} has to name a field of text; a sample has {what}")
        tokenizer, end = self._tokenizer.get()
        try:
            # encode() also finds out where each token lies in the text, which takes as long again
            (encoded,) = tokenizer.encode_batch_fast([value], add_special_tokens=self._special_tokens)
        except TypeError as error:
            raise SourceError(f"the text {value[:40]!r} cannot be tokenized: {error}") from error
        ids = encoded.ids
        if self._max_length is not None:  # the tokenizer has cut it, unless its own special tokens alone are more
            ids = ids[: self._max_length - len(end)]
        made = {name: one for name, one in sample.items() if self._keep_text or name != self._text}
        made[self._tokens] = np.array([*ids, *end], self._dtype)
        return made


def _load_tokenizer(path: str, eos: str | None, dtype: str, max_length: int | None) -> tuple[Any, list[int]]:
    """Return the tokenizer of a file, and the tokens to be added behind a text."""
    if get_worker_info() is not None:
        os.environ.setdefault(_PARALLELISM, "false")  # read when the first text is tokenized
    package = need("tokenizers", "text")
    try:
        tokenizer = package.Tokenizer.from_file(path)
    except Exception as error:
        raise SourceError(f"{path} is no tokenizer file: {error}") from error
    limit = np.iinfo(dtype).max
    if tokenizer.get_vocab_size() > limit + 1:
        raise OptionError(f"dtype={dtype!r} has no room for the {tokenizer.get_vocab_size()} tokens of {path}")
    end = [] if eos is None else [tokenizer.token_to_id(eos)]
    if None in end:
        raise OptionError(f"eos={eos!r} is no token of {path}")
    tokenizer.no_padding()  # which is PadCollate's
    tokenizer.no_truncation()
    if max_length is not None and max_length > len(end):
        tokenizer.enable_truncation(max_length - len(end))  # special tokens behind the text stay
    return tokenizer, end
