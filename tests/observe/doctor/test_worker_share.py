"""What a sample of a stream costs one of several workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from penstock.observe.doctor.probes.forked.worker_share import measure_worker_share

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


class Shared(IterableDataset[int]):
    """A stream of which each worker returns every n-th sample; it chooses before or after it makes them."""

    def __init__(self, *, makes_all: bool) -> None:
        self._makes_all = makes_all

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(100_000):
            is_own = number % step == first
            made = sum(range(10_000)) if is_own or self._makes_all else 0
            if is_own:
                yield made


class Failing(IterableDataset[Any]):
    """A stream that fails after its first sample."""

    def __iter__(self) -> Iterator[Any]:
        yield 0
        raise ValueError


@pytest.mark.parametrize(("makes_all", "low", "high"), [(True, 2.8, 6.0), (False, 0.4, 2.2)])
def test_a_worker_that_drops_the_samples_of_others_after_making_them_takes_as_many_times_as_long(
    makes_all: bool, low: float, high: float
) -> None:
    share = measure_worker_share(DataLoader(Shared(makes_all=makes_all), batch_size=8, num_workers=4), 0.8)
    assert share is not None
    assert low < share.times < high


def test_what_a_worker_does_when_it_starts_comes_before_its_share() -> None:
    class Opened(Shared):
        is_open = False

        def __iter__(self) -> Iterator[int]:
            return super().__iter__() if self.is_open else iter(())

    def open_it(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.is_open = True

    loader = DataLoader(Opened(makes_all=False), batch_size=8, num_workers=2, worker_init_fn=open_it)
    assert measure_worker_share(loader, 0.4) is not None
    assert measure_worker_share(DataLoader(Opened(makes_all=False), batch_size=8, num_workers=2), 0.4) is None


def test_a_stream_that_fails_has_no_share(capfd: pytest.CaptureFixture[str]) -> None:
    assert measure_worker_share(DataLoader(Failing(), batch_size=8, num_workers=2), 0.2) is None
    assert not capfd.readouterr().err
