"""The rows of the table, one file per kind; each is a function from a plan to results."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.figures import Result
from benchmarks.race import Plan
from benchmarks.rows import decode, first_batch, main_cpu, memory, slow, tiny, transport

ROWS: dict[str, Callable[[Plan], list[Result]]] = {
    "transport": transport.with_workers,
    "inline": transport.inline,
    "copies": transport.copies,
    "tiny": tiny.row,
    "decode": decode.row,
    "slow": slow.row,
    "first-batch": first_batch.row,
    "memory": memory.row,
    "main-cpu": main_cpu.row,
}
