"""How other programs say what their .bin files of tokens hold.

llm.c       a header of 256 int32: magic, version, number of tokens; then the tokens. fineweb's and nanogpt's shards too
Megatron    an .idx file beside: "MMIDIDX", 2 bytes of zeros; version 1 (u64); a code for the dtype (u8); the numbers of
            sequences (u64) and of places of documents (u64); the sequences' lengths (int32) and first bytes (int64);
            the first sequence of each document, and the number of sequences (int64). More may follow, and is not read

Sources: karpathy/llm.c, dev/data/data_common.py; NVIDIA/Megatron-LM, core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from penstock.core.errors import SourceError
from penstock.data.storage.storage import Storage, is_remote

_LLM_C_NBYTES = 1024
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Version and dtype by magic: of GPT-2's tokens, and of Llama 3's."""

_MEGATRON = struct.Struct("<9sQBQQ")
_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""By code; 6 and 7 are floats."""


def parse_llm_c(head: bytes, path: str, nbytes: int) -> tuple[int, np.dtype[Any], int] | None:
    """Return where the tokens of one of llm.c's files begin, their dtype and number; None if it is none.

    Args:
        head: its first bytes, 1024 or more if it has as many.
        path: of the file.
        nbytes: of the file.

    Raises:
        SourceError: the version is unknown, or the file has another size than its header says.
    """
    if min(len(head), nbytes) < _LLM_C_NBYTES:
        return None
    magic, version, count = struct.unpack_from("<iii", head)
    if magic not in _LLM_C:
        return None
    known, dtype = _LLM_C[magic]
    if version != known:
        raise SourceError(f"{path} has version {version} of llm.c's header; {known} is known, for the magic {magic}")
    if _LLM_C_NBYTES + count * dtype.itemsize != nbytes:
        raise SourceError(
            f"{path} should have {count} tokens of {dtype.name}, as its header says, and has {nbytes - _LLM_C_NBYTES} "
            f"bytes of them: it is truncated, or something else"
        )
    return _LLM_C_NBYTES, dtype, count


def find_megatron_index(path: str, storage: Storage) -> str | None:
    """Return the local path of the .idx file that lies beside a .bin file; None if there is none.

    Raises:
        SourceError: nobody can tell, as the storage does not answer.
    """
    beside = path.removesuffix(".bin") + ".idx"
    if not is_remote(beside) and not os.path.exists(beside):
        return None
    try:
        return storage.local(beside)
    except SourceError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def read_megatron_index(path: str, of: str, nbytes: int) -> tuple[np.dtype[Any], np.ndarray]:
    """Return the dtype of Megatron's tokens, and where their documents begin and the last one ends, in tokens.

    `of` is the path of the .bin file that the .idx file at `path` describes, and `nbytes` are its bytes.

    Raises:
        SourceError: it is no index of Megatron's, or describes another file.
    """
    with open(path, "rb") as file:
        head = file.read(_MEGATRON.size)
        if len(head) < _MEGATRON.size or not head.startswith(_MEGATRON_MAGIC):
            raise SourceError(f"{path} lies beside {of}, and is no index of Megatron's: it does not begin with MMIDIDX")
        _, version, code, sequences, places = _MEGATRON.unpack(head)
        if version != 1 or code not in _MEGATRON_DTYPES:
            raise SourceError(
                f"{path} is of version {version}, of tokens of code {code}; integers of version 1 are read"
            )
        needed, there = _MEGATRON.size + 12 * sequences + 8 * places, os.fstat(file.fileno()).st_size
        if needed > there:
            raise SourceError(f"{path} is truncated: its {sequences} sequences take {needed} bytes, and it has {there}")
        sizes, starts, documents = (
            np.frombuffer(file.read(count * width), f"<i{width}").astype(np.int64)
            for count, width in ((sequences, 4), (sequences, 8), (places, 8))
        )
    dtype = _MEGATRON_DTYPES[code]
    bounds = np.append(0, np.cumsum(sizes))
    if sizes.min(initial=0) < 0 or not np.array_equal(starts, bounds[:-1] * dtype.itemsize):
        raise SourceError(f"{path}: its sequences do not lie one after another, which is not read")
    if bounds[-1] * dtype.itemsize != nbytes:
        raise SourceError(f"{path} is of {bounds[-1]} tokens of {dtype.name}, and {of} has {nbytes} bytes")
    if not places:
        return dtype, bounds
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise SourceError(f"{path}: its documents do not go up from sequence 0 to {sequences}, the last one's end")
    return dtype, bounds[documents]
