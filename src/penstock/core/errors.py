"""The exceptions of penstock.

    PenstockError
    ├── OptionError          (ValueError)            an argument is out of range, or excludes another
    ├── UnpicklableError     (pickle.PicklingError)  an object cannot be sent to a worker process
    ├── TransportError       (RuntimeError)          shared memory, descriptors or ring_bytes ran out
    ├── WorkerError          (RuntimeError)          a worker process failed
    │   ├── WorkerStartError                         it died before its first task
    │   ├── WorkerKilledError                        it died on the same sample, again and again
    │   └── WorkerTimeoutError                       it returned no batch for `timeout` seconds
    ├── SourceError          (ValueError)            data cannot be opened, or is not in its format
    │   └── RecordError                              one record is corrupt: file, byte, key
    ├── StateError           (ValueError)            a loader's state does not fit the loader
    ├── ExtraError           (ImportError)           an optional package is not installed
    ├── RankError            (RuntimeError)          another rank failed, so no rank continues
    └── ScriptError          (RuntimeError)          `penstock run` cannot run its argument

    OutOfMemoryError (torch.OutOfMemoryError), in `memory/explain.py`, is a PenstockError too: the one that needs torch.

Every message has what was needed, what there was, and what to change, and shows neither secrets nor control characters.
An exception raised by a user's dataset or collate_fn keeps its type, as in torch's DataLoader.
"""

import pickle
from typing import Any

from penstock.core.urls import printable, redact, shown


class PenstockError(Exception):
    """The base of every error that penstock raises itself."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*(shown(one) if isinstance(one, str) else one for one in arguments), **options)


class OptionError(PenstockError, ValueError):
    """An argument is out of range, has the wrong type, or excludes another."""


class UnpicklableError(PenstockError, pickle.PicklingError):
    """An object has to be sent to a worker process, and cannot be pickled."""


class TransportError(PenstockError, RuntimeError):
    """Shared memory, file descriptors or the ring's byte budget ran out."""


class WorkerError(PenstockError, RuntimeError):
    """A worker failed."""


class WorkerStartError(WorkerError):
    """A worker process died before its first task, more than once."""


class WorkerKilledError(WorkerError):
    """Worker processes died on the same sample until it was quarantined."""


class WorkerTimeoutError(WorkerError):
    """No batch arrived for `timeout` seconds."""


class SourceError(PenstockError, ValueError):
    """Data cannot be opened, or is not in the format that its name or header names."""


class RecordError(SourceError):
    """One record is truncated, corrupt or larger than allowed.

    Args:
        path: the file.
        offset: the byte at which the record begins; -1 if unknown.
        key: its number, or its name.
        reason: what is wrong.
    """

    def __init__(self, path: str, offset: int, key: object, reason: str) -> None:
        super().__init__(path, offset, key, reason)
        self.path = path
        self.offset = offset
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        where = f" at byte {self.offset}" if self.offset >= 0 else ""
        return redact(f"{_one_line(self.path)}: record {_one_line(str(self.key))}{where}: {_one_line(self.reason)}")


def _one_line(text: str) -> str:
    r"""Return text from a file without ends of lines, too.

    >>> _one_line("größer"), _one_line("a\n\x1b[31m")
    ('größer', 'a\\n\\x1b[31m')
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class StateError(PenstockError, ValueError):
    """A loader's state belongs to another dataset, other arguments, or another version of the state's format."""


class ExtraError(PenstockError, ImportError):
    """An optional package is not installed."""


class RankError(PenstockError, RuntimeError):
    """Another rank failed, or this one has other batches than the others, so no rank continues."""


class ScriptError(PenstockError, RuntimeError):
    """The argument of `penstock run` is not a script that it can run."""
