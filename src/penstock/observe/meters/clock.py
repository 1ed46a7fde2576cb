"""Converts the monotonic time stamps of all processes to the wall clock that other tools write.

Stamps are CLOCK_MONOTONIC, one clock for all processes of a machine. torch.profiler writes the wall clock, in
microseconds since a base that its file names (`baseTimeNanoseconds`): the start of a quarter of a year of
7 889 238 s since 1970. Source: `ChromeTraceBaseTime` in libkineto, output_json.cpp, and traces of torch 2.13.

Both clocks are read together once. They stay in step unless somebody sets the wall clock: NTP slews both.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass

_QUARTER_S = 7_889_238


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """The same time on both clocks."""

    monotonic_ns: int
    """By `time.perf_counter_ns`."""

    unix_ns: int
    """In nanoseconds since 1970, in UTC."""

    uncertainty_ns: int = 0
    """How far apart the two readings may lie."""

    def unix_of(self, stamp_ns: int) -> int:
        """Return the wall-clock time of a stamp.

        >>> Clock(monotonic_ns=100, unix_ns=5_000).unix_of(130)
        5030
        """
        return self.unix_ns + stamp_ns - self.monotonic_ns

    def iso_time(self) -> str:
        """Return the wall-clock time in UTC, as ISO 8601 with milliseconds.

        >>> Clock(monotonic_ns=0, unix_ns=1_800_000_000_250_000_000).iso_time()
        '2027-01-15T08:00:00.250+00:00'
        """
        time_of_day = datetime.datetime.fromtimestamp(self.unix_ns / 1e9, datetime.UTC)
        return time_of_day.isoformat(timespec="milliseconds")

    def elapsed_s(self) -> float:
        """Return the seconds that have passed since the clocks were read."""
        return (time.perf_counter_ns() - self.monotonic_ns) / 1e9


def read_clock() -> Clock:
    """Read both clocks, and return the closest of 16 pairs of readings (usually below a microsecond apart)."""
    best: Clock | None = None
    for _ in range(16):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        if best is None or after - before < best.uncertainty_ns:
            best = Clock(monotonic_ns=(before + after) // 2, unix_ns=unix, uncertainty_ns=after - before)
    assert best is not None
    return best


def trace_base_ns(unix_ns: int) -> int:
    """Return the time base of traces that torch.profiler writes at `unix_ns`.

    >>> trace_base_ns(1_795_259_062_675_175_774)
    1790857026000000000
    """
    return unix_ns // 10**9 // _QUARTER_S * _QUARTER_S * 10**9
