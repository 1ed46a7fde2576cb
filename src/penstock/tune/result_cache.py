"""The results of earlier searches, by dataset, step, budget and machine, in the user's cache folder.

One file for each key, $XDG_CACHE_HOME/penstock/tune/KEY.json (~/.cache without that variable):

    {"schema": "penstock.tune/1", "key": {...}, "found": {...}}

The name is a hash of `key`, which the file repeats in readable form; `found` is what `TuneResult.to_json` returns. A
file is written completely or not at all. One that cannot be read is not an error: the search runs once more and
replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from penstock import __version__
from penstock.core.host import total_nbytes, usable_cores
from penstock.core.object_attributes import attributes_of, has_attributes
from penstock.loader.dataloader import DataLoader, config_of
from penstock.tune.search_result import TuneResult
from penstock.tune.tuned_loop import TunedLoop, copy_sharing_arrays

SCHEMA = "penstock.tune/1"
_KEYED_SAMPLES = 3
_DEPTH = 3


def cache_key(loop: TunedLoop, **limits: Any) -> dict[str, Any]:
    """Return what a search depends on, as plain data: the dataset and its code, the step, `limits`, the machine.

    Of the dataset's contents, only the shapes of its first samples count, not their bytes.
    """
    loader = loop.loader
    return {
        "dataset": _describe(loader.dataset),
        "samples": _sample_shapes(loop),
        "batch_size": loader.batch_size,
        "batch_sampler": type(loader.batch_sampler).__qualname__,
        "collate_fn": _code(loader.collate_fn),
        "dispatch": config_of(loader).dispatch if isinstance(loader, DataLoader) else "auto",
        "in_order": loader.in_order,
        "persistent_workers": loader.persistent_workers,
        "step": _code(loop.step) if loop.step is not None else loop.step_s,
        **limits,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": usable_cores(),
            "memory_nbytes": total_nbytes(),
            "accelerator": str(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else ""),
        },
        "versions": {"penstock": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


class TuneResultCache:
    """A folder of results.

    Args:
        folder: where; the user's cache folder by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = folder or Path(home) / "penstock" / "tune"

    def load(self, key: dict[str, Any]) -> tuple[TuneResult | None, str]:
        """Return the result for `key` or None, and a message about a file that could not be used."""
        file = self._file(key)
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None, ""
        except (OSError, UnicodeDecodeError) as error:
            return None, f"{file} cannot be read ({error}); searching again"
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                return None, f"{file} was written by another version; searching again"
            return TuneResult.from_json(data["found"]), ""
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            return None, f"{file} is broken; searching again"

    def save(self, key: dict[str, Any], found: TuneResult) -> str:
        """Keep the result for `key`; return a message if that fails."""
        file = self._file(key)
        text = json.dumps({"schema": SCHEMA, "key": key, "found": found.to_json()}, indent=1, default=repr) + "\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
            try:
                with open(descriptor, "w", encoding="utf-8") as stream:
                    stream.write(text)
                Path(partial).replace(file)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
        except OSError as error:
            return f"the result is not kept: {file.parent} cannot be written ({error.strerror})"
        return ""

    def _file(self, key: dict[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True, default=repr)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _describe(value: Any, depth: int = _DEPTH) -> Any:
    """Return an object's class, code and length, and those of its attributes, without its contents."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"array {value.shape} {value.dtype}"
    if callable(value) and not has_attributes(value):
        return _code(value)
    description: dict[str, Any] = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
    if hasattr(type(value), "__len__"):
        try:
            description["length"] = len(value)
        except (TypeError, NotImplementedError):
            description["length"] = None
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return description
    description["code"] = _code(type(value))
    if depth and has_attributes(value):
        description["parts"] = {name: _describe(part, depth - 1) for name, part in sorted(attributes_of(value).items())}
    return description


def _code(value: Any) -> str:
    """Return a function's or class's name, and a hash of its code."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, type):
        own = [cls for cls in value.__mro__ if cls.__module__.partition(".")[0] not in ("builtins", "torch", "typing")]
        functions = [function for cls in own for _, function in sorted(vars(cls).items())]
    else:
        functions = [value]
    codes = [_bytes_of(code) for function in functions if (code := getattr(function, "__code__", None)) is not None]
    return f"{name} {hashlib.sha256(b' '.join(codes)).hexdigest()[:12]}" if codes else name


def _bytes_of(code: CodeType) -> bytes:
    """Return a function's instructions, names and constants, without the file and line where it is defined."""
    constants = [_bytes_of(one) if isinstance(one, CodeType) else repr(one).encode() for one in code.co_consts]
    return b" ".join((code.co_code, repr(code.co_names).encode(), *constants))


def _sample_shapes(loop: TunedLoop) -> list[Any]:
    """Return the shapes of the first samples; nothing for datasets that cannot be indexed by number."""
    if loop.is_iterable:
        return []
    dataset = copy_sharing_arrays(loop.loader.dataset)
    try:
        return [_shapes(dataset[index]) for index in range(_KEYED_SAMPLES)]
    except Exception:  # noqa: BLE001  the user's dataset: its keys may be no numbers, its samples may fail
        return []


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _shapes(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shapes(part) for part in value[:8]]
    shape = getattr(value, "shape", None)
    return f"{tuple(shape)} {getattr(value, 'dtype', '')}" if shape is not None else type(value).__name__
