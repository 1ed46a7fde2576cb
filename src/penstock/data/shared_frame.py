"""A pandas DataFrame whose columns lie in shared memory. Imported only where a program has imported pandas.

Layout of the segment: the frame's pickle (protocol 5), then the buffers that it refers to (PEP 574).
"""

from __future__ import annotations

import pickle
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pandas

from penstock.core.errors import OptionError
from penstock.core.shared_bytes import SharedBytes
from penstock.core.units import round_up

_ALIGNMENT = 64


class SharedFrame(pandas.DataFrame):  # type: ignore[misc]
    """A DataFrame that is pickled as the place of its memory; what is taken of it or computed is plain.

    Its memory cannot be written to, but pandas replaces columns, names and the index of any frame. One that was changed
    so is pickled as what it holds.
    """

    _internal_names: ClassVar[list[str]] = [*pandas.DataFrame._internal_names, "_parts", "_sizes"]
    _internal_names_set: ClassVar[set[str]] = {*_internal_names}

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_as_made():
            return _mapped, (self._parts, self._sizes)
        return _plain, (pandas.DataFrame(self).__finalize__(self),)

    def _is_as_made(self) -> bool:
        made = _unpickled(self._parts, self._sizes)
        return (
            self.columns.identical(made.columns)
            and self.index.identical(made.index)
            and (self.attrs, self.flags) == (made.attrs, made.flags)
            and all(_is_same(self.iloc[:, at], made.iloc[:, at]) for at in range(len(made.columns)))
        )


def _is_same(column: pandas.Series, made: pandas.Series) -> bool:
    """Return whether a column is the one that was made: it lies there, or else has the same values."""
    if column.dtype != made.dtype:
        return False
    if isinstance(column.dtype, np.dtype) and column.dtype.kind not in "mM":  # times are copies, as no buffer has them
        one, other = column.to_numpy(), made.to_numpy()
        if one.ctypes.data == other.ctypes.data and one.strides == other.strides:
            return True
    return bool(column.equals(made))


def share_frame(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a shared copy of a DataFrame.

    Raises:
        OptionError: a column or the index holds Python objects.
    """
    if isinstance(frame, SharedFrame) and frame._is_as_made():
        return frame
    dtypes = [*frame.dtypes.items(), ("the index", frame.index.dtype)]
    objects = [str(name) for name, dtype in dtypes if _holds_objects(dtype)]
    if objects:
        raise OptionError(
            f"of this DataFrame {', '.join(objects)} would be Python objects, which each worker copies; make text "
            "Arrow's (frame.astype({'name': 'string[pyarrow]'})), reset an index, or share a column as a list: "
            "penstock.shared(frame['name'].tolist())"
        )
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(frame, 5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    sizes = tuple(piece.nbytes for piece in pieces)
    places = _places(sizes)
    parts = SharedBytes(places[-1])
    for piece, place in zip(pieces, places, strict=False):
        parts.memory[place : place + piece.nbytes] = piece
    parts.protect()
    return _mapped(parts, sizes)


def _holds_objects(dtype: Any) -> bool:
    is_python_text = isinstance(dtype, pandas.StringDtype) and dtype.storage == "python"
    return dtype == np.dtype(object) or is_python_text


def _plain(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame


def _places(sizes: tuple[int, ...]) -> list[int]:
    return [*accumulate((round_up(size, _ALIGNMENT) for size in sizes), initial=0)]


def _mapped(parts: SharedBytes, sizes: tuple[int, ...]) -> pandas.DataFrame:
    found = _unpickled(parts, sizes)
    frame = SharedFrame(found).__finalize__(found)  # attrs and flags
    frame._parts, frame._sizes = parts, sizes
    return frame


def _unpickled(parts: SharedBytes, sizes: tuple[int, ...]) -> Any:
    memory = parts.memory
    head, *buffers = [memory[place : place + size] for place, size in zip(_places(sizes), sizes, strict=False)]
    return pickle.loads(head, buffers=buffers)
