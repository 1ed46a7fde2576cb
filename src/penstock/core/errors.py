"""The exceptions penstock raises.

    PenstockError
    ├── OptionError          (ValueError)            an argument that cannot work, and what to pass instead
    ├── UnpicklableError     (pickle.PicklingError)  an object that cannot travel to a worker process
    ├── TransportError       (RuntimeError)          shared memory, descriptors or the ring's budget ran out
    ├── WorkerError          (RuntimeError)          a worker process could not do its work
    │   ├── WorkerStartError                         it died before its first piece of work
    │   ├── WorkerKilledError                        it died while making a sample, again and again
    │   └── WorkerTimeoutError                       it gave nothing for `timeout` seconds
    ├── SourceError          (ValueError)            data that cannot be opened, or is not what it says it is
    │   └── RecordError                              one record of it: file, byte, key
    ├── StateError           (ValueError)            a state that is not of the loader that is to go on from it
    ├── ExtraError           (ImportError)           an optional package is missing, and which extra brings it
    ├── RankError            (RuntimeError)          another rank of a parallel model could not go on
    └── ScriptError          (RuntimeError)          `penstock run` was given something that is no script

Every message says what was needed, what there was, and what to change. An exception raised by a user's
dataset or collate_fn keeps its own type, as in torch's DataLoader.
"""

import pickle


class PenstockError(Exception):
    """The base of every error that penstock raises on its own account."""


class OptionError(PenstockError, ValueError):
    """An argument that cannot work."""


class UnpicklableError(PenstockError, pickle.PicklingError):
    """An object that has to travel to a worker process, and cannot be pickled."""


class TransportError(PenstockError, RuntimeError):
    """Shared memory, file descriptors or the ring's byte budget ran out."""


class WorkerError(PenstockError, RuntimeError):
    """A worker could not do its work."""


class WorkerStartError(WorkerError):
    """A worker process died before its first piece of work, more than once."""


class WorkerKilledError(WorkerError):
    """Worker processes died on the same sample until it was put in quarantine."""


class WorkerTimeoutError(WorkerError):
    """No batch came for `timeout` seconds."""


class SourceError(PenstockError, ValueError):
    """Data that cannot be opened, or is not what it says it is."""


class RecordError(SourceError):
    """One record is truncated, corrupt or larger than allowed.

    Args:
        path: the file.
        offset: the byte at which the record begins; -1 where nobody knows.
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
        return f"{self.path}: record {_printable(str(self.key))}{where}: {_printable(self.reason)}"


def _printable(text: str) -> str:
    r"""Return text that comes from a file so that it cannot steer a terminal.

    >>> _printable("größer"), _printable("a\n\x1b[31m")
    ('größer', 'a\\n\\x1b[31m')
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class StateError(PenstockError, ValueError):
    """A loader's state belongs to another dataset, other arguments, or another format of states."""


class ExtraError(PenstockError, ImportError):
    """An optional package is not installed."""


class RankError(PenstockError, RuntimeError):
    """Another rank of a parallel model could not go on, so that no rank did."""


class ScriptError(PenstockError, RuntimeError):
    """`penstock run` was given something that it cannot run."""
