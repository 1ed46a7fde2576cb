"""Documents → pieces of at most one length → full sequences: the arithmetic, of sizes only."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Documents, or parts of them, by their places in a row of tokens."""

    starts: np.ndarray
    sizes: np.ndarray

    ends: np.ndarray
    """Where the document of each ends."""


def split_documents(bounds: np.ndarray, length: int | None) -> Pieces:
    """Cut documents into pieces of at most `length`, of which empty ones have none; None leaves them whole.

    >>> starts, sizes, _ = split_documents(np.array([0, 5, 5, 7]), 2)
    >>> starts.tolist(), sizes.tolist()
    ([0, 2, 4, 5], [2, 2, 1, 2])
    """
    if length is None:
        return Pieces(bounds[:-1], np.diff(bounds), bounds[1:])
    counts = -(-np.diff(bounds) // length)
    document = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, ends = bounds[document] + within * length, bounds[document + 1]
    return Pieces(starts, np.minimum(length, ends - starts), ends)


def pack_documents(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces together to sequences of at most `length`: best fit, longest first.

    Pieces of one size are interchangeable, and so are sequences with one gap. The loop is over sizes and gaps: the time
    grows with the number of sequences and of sizes, hardly with that of pieces.

    Args:
        sizes: of the pieces, each from 1 to `length`.
        length: of a sequence.

    Returns:
        The pieces' numbers, sequence by sequence, and where in them each sequence begins, and the end.

    >>> order, cuts = pack_documents(np.array([3, 1, 2, 4]), 4)
    >>> [order[a:b].tolist() for a, b in zip(cuts[:-1], cuts[1:])]
    [[0, 1], [2], [3]]
    """
    by_size = np.argsort(-sizes, kind="stable")
    sequence_of = np.empty(len(sizes), np.int64)
    with_gap: dict[int, list[np.ndarray]] = {}  # which sequences have so much room
    gaps: list[int] = []  # in order

    def note(gap: int, sequences: np.ndarray) -> None:
        if gap and len(sequences):
            if not with_gap.setdefault(gap, []):
                bisect.insort(gaps, gap)
            with_gap[gap].append(sequences)

    made = at = 0
    kinds, counts = np.unique(-sizes, return_counts=True)
    for size, count in zip((-kinds).tolist(), counts.tolist(), strict=True):
        last = at + count
        while at < last:
            smallest = bisect.bisect_left(gaps, size)
            gap = gaps[smallest] if smallest < len(gaps) else length
            each = gap // size
            wanted = -(-(last - at) // each)
            if smallest < len(gaps):
                sequences = with_gap[gap].pop()
                if not with_gap[gap]:
                    gaps.pop(smallest)
                note(gap, sequences[wanted:])
                sequences = sequences[:wanted]
            else:
                sequences = np.arange(made, made + wanted)
                made += wanted
            placed = min(last - at, len(sequences) * each)
            sequence_of[by_size[at : at + placed]] = np.repeat(sequences, each)[:placed]
            full = placed // each
            note(gap - each * size, sequences[:full])
            note(gap - (placed - full * each) * size, sequences[full:])
            at += placed
    _, firsts = np.unique(sequence_of, return_index=True)
    place = np.empty(made, np.int64)
    place[np.argsort(firsts)] = np.arange(made)
    sequence_of = place[sequence_of]
    return np.argsort(sequence_of, kind="stable"), np.append(0, np.cumsum(np.bincount(sequence_of, minlength=made)))
