"""The benchmark cases, one file per kind; each is a function from the run's options to results."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.benchmark_result import Result
from benchmarks.cases import decode, first_batch, instructions, main_cpu, memory, pass_start, slow, tiny, transport
from benchmarks.interleaved import RunOptions

CASES: dict[str, Callable[[RunOptions], list[Result]]] = {
    "transport": transport.with_workers,
    "inline": transport.inline,
    "copies": transport.copies,
    "tiny": tiny.run,
    "decode": decode.run,
    "slow": slow.run,
    "first-batch": first_batch.run,
    "memory": memory.run,
    "main-cpu": main_cpu.run,
    "pass-start": pass_start.run,
    "instructions": instructions.run,
}
