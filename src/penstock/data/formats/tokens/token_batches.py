"""`TokenBatches`: batches of samples of about one length, as many in each as a number of tokens allows.

    order     random, or the samples' own
    buckets   of `bucket` samples of that order, sorted by length
    batches   cut from a bucket, from short to long: as many samples as fit, longest × count at most `max_tokens`. The
              last one of a bucket, which is not full, goes into the next bucket
    shuffle   the batches of a pass, so that lengths come in no order

A larger bucket pads less, and mixes less: samples of one bucket and of one length are always near each other.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from penstock.core.errors import OptionError, SourceError

_STATE = 1
_BATCHES_IN_A_BUCKET = 64


class TokenBatches(Sampler[list[int]]):
    """A batch sampler whose batches have at most `max_tokens` tokens, padding included.

    Args:
        lengths: of the samples, in tokens.
        max_tokens: the longest sample of a batch × its samples is at most this.
        shuffle: whether each pass has another random order.
        seed: of the orders; drawn from torch's random state, now, where it is None.
        bucket: samples that are sorted by length together; about 64 batches of them where it is None.
        multiple_of: lengths count as if padded to a multiple of it, as by `PadCollate(multiple_of=)`.
        max_samples: the most in a batch.
        drop_last: leave out the one batch of a pass that is not full.
        rank: which of `ranks` this is; each gets as many batches, and up to `ranks` - 1 at the end are left out.
        ranks: how many share out the batches. All need the same seed.

    Raises:
        OptionError: a sample alone has more than `max_tokens`, or a number is below 1.

    Example:
        >>> batches = TokenBatches([3, 9, 4, 8, 2], max_tokens=18, seed=0)
        >>> len(batches), sorted(sorted(batch) for batch in batches)
        (2, [[0, 2, 4], [1, 3]])

    That is what `DataLoader(dataset, batch_sampler=batches, collate_fn=PadCollate({"tokens": 0}))` takes.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        bucket: int | None = None,
        multiple_of: int = 1,
        max_samples: int | None = None,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        given = {"max_tokens": max_tokens, "bucket": bucket, "multiple_of": multiple_of, "max_samples": max_samples}
        for name, value in given.items():
            if value is not None and value < 1:
                raise OptionError(f"{name}={value} has to be 1 or more")
        if not 0 <= rank < ranks:
            raise OptionError(f"rank={rank} has to be one of {ranks} ranks, counted from 0")
        self._lengths = np.asarray(lengths, np.int64)
        if self._lengths.ndim != 1 or (self._lengths < 0).any():
            raise OptionError(f"lengths have to be a row of numbers of tokens, not of shape {self._lengths.shape}")
        self._padded = np.maximum(-(-self._lengths // multiple_of) * multiple_of, 1)
        if len(self._padded) and self._padded.max() > max_tokens:
            longest = int(self._padded.argmax())
            raise OptionError(
                f"sample {longest} has {self._lengths[longest]} tokens, and max_tokens={max_tokens} for a whole batch; "
                "cut it, leave it out, or raise max_tokens"
            )
        self._max_tokens = max_tokens
        self._max_samples = max_samples or max_tokens
        self._shuffle = shuffle
        self._seed = int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
        mean = max(1.0, float(self._padded.mean())) if len(self._padded) else 1.0
        self._bucket = bucket or max(1, int(_BATCHES_IN_A_BUCKET * max_tokens / mean))
        self._drop_last = drop_last
        self._rank, self._ranks = rank, ranks
        self._epoch = 0
        self._is_begun = False
        self._position = 0
        self._resumes = 0
        self._plan: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        """Return the batches of the pass that is under way, or else of the next one."""
        return len(self._batches()[1]) - 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`; without it passes count by themselves."""
        self._epoch = epoch
        self._is_begun = False

    def state_dict(self) -> dict[str, int]:
        """Return where the current pass is: how many of its batches have been given."""
        return {"version": _STATE, "seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next pass go on where `state` was taken.

        Raises:
            SourceError: it is the state of something else.
        """
        try:
            seed, epoch, position = int(state["seed"]), int(state["epoch"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"this is no state of batches by tokens: {state!r}") from error
        if state.get("version") != _STATE or position < 0:
            raise SourceError(f"this is no state of batches by tokens: {state!r}")
        self._seed, self._epoch, self._resumes = seed, epoch, position
        self._position = position
        self._is_begun = False
        self._plan = None
        if position > len(self):
            raise SourceError(f"this is no state of these {len(self)} batches: {state!r}")

    def __iter__(self) -> Iterator[list[int]]:
        if self._is_begun:  # the pass before was left in its middle
            self._epoch += 1
        self._is_begun = True
        start, self._resumes = self._resumes, 0
        order, cuts = self._batches()
        epoch = self._epoch
        self._position = start
        for number in range(start, len(cuts) - 1):
            self._position = number + 1
            yield order[cuts[number] : cuts[number + 1]].tolist()
        if epoch == self._epoch and self._is_begun:
            self._epoch, self._is_begun, self._position = epoch + 1, False, 0

    def padding(self) -> float:
        """Return the share of padding in all batches of a pass, from 0 to 1."""
        order, cuts = self._batches()
        if not len(order):
            return 0.0
        longest = np.maximum.reduceat(self._padded[order], cuts[:-1])
        return float(1 - self._lengths[order].sum() / (longest * np.diff(cuts)).sum())

    def _batches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of this pass in their order, and where each batch begins, and the end."""
        if self._plan is None or self._plan[0] != self._epoch:
            self._plan = (self._epoch, *self._planned(np.random.default_rng([self._seed & (2**64 - 1), self._epoch])))
        return self._plan[1], self._plan[2]

    def _planned(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        count = len(self._padded)
        samples = rng.permutation(count) if self._shuffle else np.arange(count)
        pieces: list[np.ndarray] = []
        sizes: list[int] = []
        left = samples[:0]
        for at in range(0, count, self._bucket):
            bucket = np.concatenate([left, samples[at : at + self._bucket]])
            bucket = bucket[np.argsort(self._padded[bucket], kind="stable")]
            ends = self._cut(self._padded[bucket].tolist())
            is_last = at + self._bucket >= count
            if not is_last or (self._drop_last and not self._is_full(bucket[ends[-2] :])):
                ends.pop()
            pieces.append(bucket[: ends[-1]])
            sizes += np.diff(ends).tolist()
            left = bucket[ends[-1] :]
        order = np.concatenate([samples[:0], *pieces])
        cuts = np.append(0, np.cumsum(sizes, dtype=np.int64))
        numbers = rng.permutation(len(sizes)) if self._shuffle else np.arange(len(sizes))
        numbers = numbers[: len(numbers) // self._ranks * self._ranks][self._rank :: self._ranks]
        mine = [order[cuts[number] : cuts[number + 1]] for number in numbers.tolist()]
        return np.concatenate([samples[:0], *mine]), np.append(0, np.cumsum([len(one) for one in mine], dtype=np.int64))

    def _cut(self, lengths: list[int]) -> list[int]:
        """Return where batches begin and end in samples sorted from short to long."""
        ends = [0]
        while (start := ends[-1]) < len(lengths):
            most = min(self._max_samples, self._max_tokens // lengths[start], len(lengths) - start)
            # count × the count-th sample's length only grows with the count
            fits = bisect.bisect_right(range(1, most + 1), self._max_tokens, key=lambda n: n * lengths[start + n - 1])
            ends.append(start + fits)
        return ends

    def _is_full(self, batch: np.ndarray) -> bool:
        longest = int(self._padded[batch].max())
        return len(batch) >= self._max_samples or longest * (len(batch) + 1) > self._max_tokens
