"""How a dataset's time divides into reading, decoding and everything else.

cProfile measures how long each function ran without the functions that it called, also those written in C, by name: a
`read` of an open file counts as reading, a `decode` of Pillow's as decoding. What no name identifies (operators,
indexing, the user's Python) is the rest.
"""

from __future__ import annotations

import cProfile
import os
import re
from collections.abc import Callable
from typing import Any

from penstock.core.package_folder import PACKAGE_FOLDER
from penstock.observe.doctor.probe_results import Hotspot
from penstock.observe.doctor.probes.steps.step_calls import NOT_THE_USERS
from penstock.observe.doctor.thresholds import THRESHOLDS

_STORAGE = re.compile(
    r"built-in method (_?io\.open|posix\.(open|read|pread|readv|preadv|stat|lstat|listdir|scandir|lseek)|time\.sleep"
    r"|select\.\w+|_socket\.\w+|nt\.\w+)"
    r"|method '(read|readinto|readinto1|readline|readlines|read1|recv|recv_into|seek|__enter__|close)'"
    r" of '(_io|_ssl|_socket|mmap)"
    r"|built-in method numpy\.fromfile"
    r"|method '(get|execute|fetchone|fetchall)' of '(sqlite3|lmdb|Cursor|Environment|Transaction)"
)
_DECODE = re.compile(
    r"method 'decode' of 'ImagingDecoder'|built-in method (zlib|_?bz2|_?lzma|_?zstd|lz4\S*|snappy\S*)\.?\S*decompress"
    r"|method '(decompress|flush)' of '(zlib|_bz2|_lzma|_zstd)|built-in method _pickle\.loads?|_json\.scanner"
    r"|method '(scan_once|load|decode)' of '(_json|_pickle|msgpack|orjson)|built-in method binascii"
    r"|(imdecode|imread|decode_(jpeg|png|image|video|webp)|torchcodec|soundfile|audioread|av\.|pyarrow|h5py)"
)
_DECODE_FILES = re.compile(
    r"/(json/decoder|json/scanner|gzip|csv|PIL/(ImageFile|\w+ImagePlugin)|imageio/\S+|tifffile/\S+|zipfile/?\w*|av/\S+"
    r"|soundfile|pydicom/\S+)\.py$"
)
_COORDINATION = re.compile(r"method '(acquire|__enter__)' of '_(thread|multiprocessing)|method '(get|put)' of '_queue")
_COORDINATION_FILES = re.compile(r"/(multiprocessing/\w+|concurrent/futures/\w+|threading|queue|selectors)\.py$")
_SHOWN_HOTSPOTS = 4


class DatasetProfile:
    """Adds up profiles of samples.

    Args:
        clock: seconds, monotonic; None for cProfile's own clock, which is quicker to read.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._profile: Any = cProfile.Profile() if clock is None else cProfile.Profile(clock)
        self._is_possible = True

    def call(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns; profile it, unless another profiler is active."""
        try:
            self._profile.enable()
        except ValueError:
            self._is_possible = False
            return make()
        try:
            return make()
        finally:
            self._profile.disable()

    def fractions(self) -> tuple[float, float, float, float] | None:
        """Return the fractions of reading, decoding, coordination and the rest; None without a profile.

        Coordination is waiting for other threads or processes: locks, and what multiprocessing sends and receives.
        """
        seconds = dict.fromkeys(("storage", "decode", "coordination", "rest"), 0.0)
        entries = self._entries()
        for entry in entries:
            seconds[_part(entry.code)] += entry.inlinetime
        for entry in entries:  # a read of a pipe is no storage: who calls the C function tells them apart
            if not isinstance(entry.code, str) and _COORDINATION_FILES.search(entry.code.co_filename):
                for callee in entry.calls or ():
                    if isinstance(callee.code, str):
                        seconds[_part(callee.code)] -= callee.inlinetime
                        seconds["coordination"] += callee.inlinetime
        total_s = sum(seconds.values())
        if not self._is_possible or not total_s:
            return None
        return tuple(max(0.0, part_s) / total_s for part_s in seconds.values())  # type: ignore[return-value]

    def hotspots(self) -> tuple[Hotspot, ...]:
        """Return the functions that took the most time, without those that they called."""
        entries = self._entries()
        total_s = sum(entry.inlinetime for entry in entries)
        largest = sorted(entries, key=lambda entry: -entry.inlinetime)[:_SHOWN_HOTSPOTS]
        return tuple(
            Hotspot(where=_where(entry.code), fraction=entry.inlinetime / total_s, caller=self._caller(entry.code))
            for entry in largest
            if total_s and entry.inlinetime / total_s >= THRESHOLDS.hotspot_fraction
        )

    def _caller(self, code: Any) -> str:
        """Return the nearest caller of `code` that is the user's own function."""
        callers: dict[Any, Any] = {}
        for entry in self._entries():
            for callee in entry.calls or ():
                callers.setdefault(callee.code, entry.code)
        seen = set()
        while code in callers and code not in seen:
            if _is_users(code):
                break
            seen.add(code)
            code = callers[code]
        return _where(code) if seen and _is_users(code) else ""

    def _entries(self) -> list[Any]:
        return [
            entry
            for entry in (self._profile.getstats() if self._is_possible else [])
            if isinstance(entry.code, str) or not entry.code.co_filename.startswith(PACKAGE_FOLDER)
            if "_lsprof.Profiler" not in str(entry.code)
        ]


def _is_users(code: Any) -> bool:
    return not isinstance(code, str) and not code.co_filename.startswith(NOT_THE_USERS)


def _part(code: Any) -> str:
    if isinstance(code, str):
        if _COORDINATION.search(code):
            return "coordination"
        if _STORAGE.search(code):
            return "storage"
        return "decode" if _DECODE.search(code) else "rest"
    if _COORDINATION_FILES.search(code.co_filename):
        return "coordination"
    return "decode" if _DECODE_FILES.search(code.co_filename) else "rest"


def _where(code: Any) -> str:
    if isinstance(code, str):
        found = re.fullmatch(r"<(?:built-in method|method) (.+?)>?", code)
        return found[1].replace("'", "") if found else code
    return f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
