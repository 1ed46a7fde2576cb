"""One line of time for everything: stamps of all processes, and the wall clock that other tools write.

Stamps are CLOCK_MONOTONIC, the same in every process of a machine. torch.profiler writes the wall clock, in
microseconds since a base that it names in its file (`baseTimeNanoseconds`): the start of a quarter of a year of
7 889 238 s since 1970. Source: `ChromeTraceBaseTime` in libkineto, output_json.cpp, and traces of torch 2.13.

The two clocks are read together once. They stay together as long as nobody sets the wall clock: what NTP slews, it
slews in both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

_QUARTER_S = 7_889_238


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """A moment on both clocks."""

    monotonic_ns: int
    """By `time.perf_counter_ns`."""

    unix_ns: int
    """The same moment, in nanoseconds since 1970, in UTC."""

    doubt_ns: int = 0
    """How far apart the two readings may have been."""

    def unix_of(self, stamp_ns: int) -> int:
        """Return the wall-clock time of a stamp.

        >>> Clock(monotonic_ns=100, unix_ns=5_000).unix_of(130)
        5030
        """
        return self.unix_ns + stamp_ns - self.monotonic_ns


def read_clock(tries: int = 16) -> Clock:
    """Read both clocks, as close together as `tries` readings allow (below a microsecond, mostly)."""
    best: Clock | None = None
    for _ in range(tries):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        if best is None or after - before < best.doubt_ns:
            best = Clock(monotonic_ns=(before + after) // 2, unix_ns=unix, doubt_ns=after - before)
    assert best is not None
    return best


def trace_base_ns(unix_ns: int) -> int:
    """Return what torch.profiler counts from in traces made at `unix_ns`.

    >>> trace_base_ns(1_795_259_062_675_175_774)
    1790857026000000000
    """
    return unix_ns // 10**9 // _QUARTER_S * _QUARTER_S * 10**9
