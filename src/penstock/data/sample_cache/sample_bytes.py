"""A sample as one run of bytes that owns nothing outside of it, and back as objects of its own.

    i64 buffers | i64 bytes of the skeleton | i64 bytes of each buffer | the skeleton | each buffer, at a multiple of 64

The skeleton is JSON in UTF-8 (lone surrogates included). Numbers, text, true, false and null stand for themselves, an
object for a dict with text as keys. A list begins with what it stands for:

    ["list", ...] ["tuple", ...] ["dict", key, value, key, value ...]
    ["plain", [...]]                                a list of numbers, text, true, false and null
    ["numbers", "<i8" or "<f8"]                     a list of int or of float alone, which is long; the next buffer
    ["bytes"]                                       the next buffer
    ["array", dtype, shape, order]                  NumPy's; the next buffer, if it has elements. dtype as in .npy files
    ["scalar", dtype, bytes in hexadecimal]         NumPy's
    ["tensor", dtype, size, stride or null, requires_grad]          the next buffer
    ["empty", dtype, size, stride, requires_grad]   a tensor without elements
    ["picture", mode, size, palette, info]          Pillow's; the next buffer

No bytes can have code run: nothing is looked up by a name but in the tables below. What is decoded shares memory with
nothing that is not of the same sample: a program may write to it. An object that is in a sample twice comes back twice.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from penstock.core import plain_tree
from penstock.core.errors import UnpicklableError
from penstock.core.units import round_up

_ALIGNMENT = 64
_ATOMS = frozenset({int, float, str, bool, type(None)})
_TEXT_ALONE = frozenset({str})
_NUMBERS = {int: "<i8", float: "<f8"}
_LONG = 32
"""Numbers that are faster to keep as an array."""
_TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TORCH_NAMES = {value: name for name, value in _TORCH_DTYPES.items()}

_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode


class _RefusedError(Exception):
    """The sample has something in it that is not kept: what, and what to do."""


def encode(sample: Any, index: object) -> bytes:
    """Return the bytes of sample `index`.

    >>> decode(np.frombuffer(bytearray(encode({"x": torch.arange(3), "y": np.ones(2)}, 0)), np.uint8))
    {'x': tensor([0, 1, 2]), 'y': array([1., 1.])}
    """
    return b"".join(encode_parts(sample, index))


def encode_parts(sample: Any, index: object) -> list[bytes | memoryview]:
    """Return what `encode` joins: the sample's own memory, not copied."""
    buffers: list[bytes | memoryview] = []
    try:
        skeleton = _to_json(_node(sample, buffers)).encode("utf-8", "surrogatepass")
    except (_RefusedError, RecursionError, ValueError) as error:  # a circle of containers; 5000 digits
        reason = str(error) or type(error).__name__
        raise UnpicklableError(
            f"sample {index} ({type(sample).__qualname__}) cannot be cached: {reason}. A cache "
            "keeps tensors, arrays, numbers, text, bytes, lists, tuples and dicts of these, and Pillow images; cache a "
            "dataset that returns these, and make the others of them after it"
        ) from error
    lengths = [len(buffer) for buffer in buffers]
    head = np.array([len(buffers), len(skeleton), *lengths], "<i8").tobytes()
    parts: list[bytes | memoryview] = [head, skeleton]
    end = len(head) + len(skeleton)
    for buffer, (start, stop) in zip(buffers, _places(end, lengths), strict=True):
        parts += [bytes(start - end), buffer]
        end = stop
    return parts


def decode(content: np.ndarray) -> Any:
    """Return the sample whose bytes these are (uint8, writable, and from now on the sample's)."""
    count, length = content[:16].view("<i8").tolist()
    at = 16 + 8 * count
    views = (content[start:stop] for start, stop in _places(at + length, content[16:at].view("<i8").tolist()))
    # Who keeps a small part of a sample must not keep all of it.
    buffers = (view if 2 * view.nbytes > content.nbytes else view.copy() for view in views)
    return _build(_from_json(content[at : at + length].tobytes().decode("utf-8", "surrogatepass")), buffers)


def _places(end: int, lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    for length in lengths:
        start = round_up(end, _ALIGNMENT)
        end = start + length
        yield start, end


# ── there ───────────────────────────────────────────────────────────────────────────────────────────────────


def _node(value: Any, buffers: list[bytes | memoryview]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is torch.Tensor:
        return _tensor_node(value, buffers)
    if kind is np.ndarray:
        return _array_node(value, buffers)
    if kind is dict or kind is list or kind is tuple:
        return _container_node(kind, value, buffers)
    if kind is bytes:
        buffers.append(value)
        return ["bytes"]
    if isinstance(value, np.generic):
        return ["scalar", _dtype_text(value.dtype), value.tobytes().hex()]
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and kind is pillow.Image:
        buffers.append(value.tobytes())
        return ["picture", value.mode, value.size, value.getpalette(), _node(value.info, buffers)]
    raise _RefusedError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def _container_node(kind: type, value: Any, buffers: list[bytes | memoryview]) -> Any:
    if kind is dict:
        if not _TEXT_ALONE.issuperset(map(type, value)):
            return ["dict", *(_node(part, buffers) for pair in value.items() for part in pair)]
        if _ATOMS.issuperset(map(type, value.values())):
            return value
        return {key: _node(part, buffers) for key, part in value.items()}
    if kind is list and _ATOMS.issuperset(kinds := {*map(type, value)}):
        return _plain_list_node(value, kinds, buffers)
    return [kind.__name__, *(_node(part, buffers) for part in value)]


def _plain_list_node(value: list[Any], kinds: set[type], buffers: list[bytes | memoryview]) -> Any:
    if len(value) >= _LONG and len(kinds) == 1 and (dtype := _NUMBERS.get(*kinds)):
        with suppress(OverflowError):  # of more than 64 bits
            buffers.append(np.array(value, dtype).view(np.uint8).data)
            return ["numbers", dtype]
    return ["plain", value]


def _tensor_node(tensor: torch.Tensor, buffers: list[bytes | memoryview]) -> Any:
    if not plain_tree.is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
        if not plain_tree.is_plain(tensor):
            raise _RefusedError(
                f"it holds a torch.Tensor that is not dense numbers on the CPU alone ({tensor.layout}, "
                f"{tensor.device}, requires_grad={tensor.requires_grad}); return tensor.detach().cpu(), "
                "or to_dense() of a sparse one"
            )
    dtype, size = _TORCH_NAMES[tensor.dtype], tuple(tensor.size())
    if tensor.numel() == 0:
        return ["empty", dtype, size, tuple(tensor.stride()), tensor.requires_grad]
    flat, stride = plain_tree.memory_of(tensor)
    buffers.append(flat.view(-1).view(torch.uint8).numpy().data)
    return ["tensor", dtype, size, stride, tensor.requires_grad]


def _array_node(array: np.ndarray, buffers: list[bytes | memoryview]) -> Any:
    node = ["array", _dtype_text(array.dtype), array.shape, "C"]
    if array.nbytes:
        if not array.flags.c_contiguous and array.flags.f_contiguous:
            node[-1], array = "F", array.T
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return node


def _dtype_text(dtype: np.dtype[Any]) -> str:
    if not dtype.hasobject:
        text = dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))
        if _dtype(text) == dtype:
            return text
    raise _RefusedError(f"it holds NumPy values of the dtype {dtype}; convert them to numbers or to a list")


# ── and back ────────────────────────────────────────────────────────────────────────────────────────────────


def _build(node: Any, buffers: Iterator[np.ndarray]) -> Any:
    if type(node) is dict:
        return {key: _build(part, buffers) for key, part in node.items()}
    if type(node) is not list:
        return node
    name, *parts = node
    return _BUILDERS[name](parts, buffers)


def _build_dict(parts: list[Any], buffers: Iterator[np.ndarray]) -> dict[Any, Any]:
    built = [_build(part, buffers) for part in parts]
    return dict(zip(built[::2], built[1::2], strict=True))


def _build_array(parts: list[Any], buffers: Iterator[np.ndarray]) -> np.ndarray:
    text, shape, order = parts
    dtype = _dtype(text)
    if 0 in shape or not dtype.itemsize:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, next(buffers), order=order)


def _build_scalar(parts: list[Any], _: Iterator[np.ndarray]) -> Any:
    dtype, data = _dtype(parts[0]), bytearray.fromhex(parts[1])
    return np.ndarray((), dtype, data if data else None)[()]


def _build_tensor(parts: list[Any], buffers: Iterator[np.ndarray]) -> torch.Tensor:
    dtype, size, stride, requires_grad = parts
    flat = torch.frombuffer(next(buffers), dtype=_TORCH_DTYPES[dtype]).clone()  # its own storage, which can be resized
    return plain_tree.shaped(flat, tuple(size), stride and tuple(stride), requires_grad)


def _build_empty(parts: list[Any], _: Iterator[np.ndarray]) -> torch.Tensor:
    return plain_tree.empty(_TORCH_DTYPES[parts[0]], *parts[1:])


def _build_picture(parts: list[Any], buffers: Iterator[np.ndarray]) -> Any:
    from PIL import Image

    mode, size, palette, info = parts
    picture = Image.frombytes(mode, tuple(size), next(buffers).tobytes())
    if palette is not None:
        picture.putpalette(palette)
    picture.info = _build(info, buffers)
    return picture


def _dtype(text: str) -> np.dtype[Any]:
    """Return the dtype that a .npy file would state so: a name, or a list of fields as Python writes it."""
    return np.lib.format.descr_to_dtype(ast.literal_eval(text)) if text.startswith(("[", "(")) else np.dtype(text)


_BUILDERS: dict[str, Callable[[list[Any], Iterator[np.ndarray]], Any]] = {
    "list": lambda parts, buffers: [_build(part, buffers) for part in parts],
    "tuple": lambda parts, buffers: tuple([_build(part, buffers) for part in parts]),
    "dict": _build_dict,
    "plain": lambda parts, _: parts[0],
    "numbers": lambda parts, buffers: next(buffers).view(parts[0]).tolist(),
    "bytes": lambda _, buffers: next(buffers).tobytes(),
    "array": _build_array,
    "scalar": _build_scalar,
    "tensor": _build_tensor,
    "empty": _build_empty,
    "picture": _build_picture,
}
