"""`benchmarks.instructions` counts exactly."""

from __future__ import annotations

import dis
from collections.abc import Iterator

from benchmarks.instructions import InstructionCounter, count_instructions


def _straight(number: int) -> int:
    return number + number


def _count(number: int) -> int:
    counter = InstructionCounter()
    counter.start()
    _straight(number)
    return counter.stop()


def test_each_instruction_of_a_function_is_counted_and_nothing_else() -> None:
    hidden = ("RESUME", "CACHE", "BINARY_OP_INPLACE_ADD_UNICODE")
    expected = [one.opname for one in dis.get_instructions(_straight) if one.opname not in hidden]
    found = [_count(number) for number in range(3)]
    assert len(set(found)) == 1
    assert found[0] - len(expected) in (0, 1)  # whether RESUME is reported differs between versions of Python


class Loader:
    """Batches that take more instructions the later they come."""

    def __iter__(self) -> Iterator[int]:
        for number in range(20):
            for _ in range(10 if number else 1000):
                pass
            yield number


def test_what_is_done_with_a_batch_is_counted_in_a_steady_state() -> None:
    def batch_of(extra: int) -> int:
        def moved(batch: int) -> int:
            for _ in range(extra):
                pass
            return batch

        found = count_instructions(Loader(), moved, passes=1, gap_s=0)
        assert found["least"] == found["most"] == found["batch"]
        return int(found["batch"])

    none, one, eight = (batch_of(extra) for extra in (0, 1, 8))
    assert none < one
    assert (eight - none) == 8 * (one - none)
