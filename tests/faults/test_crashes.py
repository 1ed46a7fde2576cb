"""Workers may die, hang or never start; the epoch ends with exactly its samples, or with one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sample_sets import Arrays, Augmented, Deadly, Hanging, Numbered, Stream, Unpicklable
from scripts import run

from penstock import DataLoader, UnpicklableError, WorkerKilledError, WorkerStartError, WorkerTimeoutError

pytestmark = [
    pytest.mark.usefixtures("preloaded_python"),
    pytest.mark.filterwarnings("ignore:A DataLoader worker .* Its work is done again:RuntimeWarning"),
]


def under_fire(loader: DataLoader, every_s: float = 0.15) -> list[int]:
    """Return the labels of an epoch during which a worker is killed every so often.

    None is killed before a batch has come since the last one was: on a slow machine workers would die faster than they
    start, which is an error, and rightly so.
    """
    batches, over, has_moved = iter(loader), threading.Event(), threading.Event()

    def shoot() -> None:
        number = 0
        while not over.wait(every_s):
            if has_moved.is_set():
                has_moved.clear()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(batches._workers[number % len(batches._workers)].pid, signal.SIGKILL)
                number += 1

    shooter = threading.Thread(target=shoot)
    shooter.start()
    try:
        labels = []
        for images, numbers in batches:
            has_moved.set()
            assert torch.equal(images.flatten(1)[:, 0], numbers.float())
            labels += numbers.tolist()
    finally:
        over.set()
        shooter.join()
    assert loader.statistics().restarts > 0
    return labels


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "arguments", [{}, {"dispatch": "round_robin"}, {"dispatch": "demand"}, {"persistent_workers": True}]
)
def test_order_is_exact_under_kills(arguments) -> None:
    loader = DataLoader(Numbered(600, delay_s=0.002), batch_size=16, num_workers=3, **arguments)
    assert under_fire(loader) == list(range(600))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_long_epoch_is_exact_with_a_worker_killed_every_second() -> None:
    loader = DataLoader(Numbered(6000, delay_s=0.002), batch_size=32, num_workers=2)
    assert under_fire(loader, every_s=1.0) == list(range(6000))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_sample_comes_once_under_kills_out_of_order() -> None:
    loader = DataLoader(Numbered(600, delay_s=0.002), batch_size=16, num_workers=3, in_order=False)
    assert sorted(under_fire(loader)) == list(range(600))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stream_is_exact_under_kills() -> None:
    expected = [int(i) for _, labels in DataLoader(Stream(900), batch_size=10, num_workers=3) for i in labels]
    loader = DataLoader(Stream(900, delay_s=0.0005), batch_size=10, num_workers=3)
    assert under_fire(loader, 0.1) == expected


def test_a_sample_that_kills_is_named() -> None:
    loader = DataLoader(Deadly(60), batch_size=8, num_workers=2)
    with pytest.raises(
        WorkerKilledError, match=r"worker \(pid \d+\) is killed by signal: Segmentation fault.*sample 37"
    ):
        list(loader)
    assert loader.statistics().quarantined == (37,)


def test_a_sample_that_kills_can_be_left_out() -> None:
    loader = DataLoader(Deadly(60), batch_size=8, num_workers=2, errors="skip")
    assert [int(i) for _, labels in loader for i in labels] == [i for i in range(60) if i != 37]
    assert loader.statistics().quarantined == (37,)


def test_a_hung_sample_is_found_by_timeout() -> None:
    loader = DataLoader(Hanging(20), batch_size=2, num_workers=2, timeout=2, multiprocessing_context="fork")
    batches = iter(loader)
    with pytest.raises(
        WorkerTimeoutError, match=r"DataLoader timed out after 2 seconds; worker \d \(pid \d+\) is at sample 5"
    ):
        list(batches)
    for process in batches._workers:
        process.kill()


def die_at_once(worker: int) -> None:
    os._exit(7)


def test_workers_that_never_live_are_one_clear_error() -> None:
    with pytest.raises(WorkerStartError, match="exited unexpectedly with code 7"):
        list(DataLoader(Numbered(8), num_workers=2, worker_init_fn=die_at_once))


def test_an_error_of_the_sampler_comes_before_the_first_batch_as_with_torch_and_keeps_its_traceback() -> None:
    def sampler():
        yield from range(6)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more") as raised:
        iter(DataLoader(Numbered(20), batch_size=2, sampler=sampler(), num_workers=2))  # which draws 4 batches ahead
    assert raised.traceback[-1].name == "sampler"


def failing_collate(samples):
    raise ZeroDivisionError(f"{len(samples)} samples")


def test_a_collate_fn_that_raises_says_where() -> None:
    with pytest.raises(ZeroDivisionError, match=r"(?s)worker process 0.*in failing_collate.*3 samples"):
        list(DataLoader(Numbered(3), batch_size=3, num_workers=1, collate_fn=failing_collate))


def test_an_unpicklable_dataset_is_one_clear_error() -> None:
    with pytest.raises(
        UnpicklableError, match=r"dataset\.transform \(function\) cannot be pickled.*'spawn'.*top of a module"
    ):
        list(DataLoader(Unpicklable(4), num_workers=1, multiprocessing_context="spawn"))


def lambdas(samples):
    return [lambda: 0]


def test_an_unpicklable_batch_is_one_clear_error() -> None:
    with pytest.raises(UnpicklableError, match="cannot travel from its worker"):
        list(DataLoader(Numbered(4), num_workers=1, collate_fn=lambdas))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_dataset_is_pickled_for_each_worker_where_its_start_method_needs_that(method: str) -> None:
    Arrays.pickled = 0
    dataset = Arrays()
    batches = list(DataLoader(dataset, batch_size=16, num_workers=3, multiprocessing_context=method))
    assert Arrays.pickled == (0 if method == "fork" else 3)
    assert all(torch.equal(images, dataset.images[labels % 64]) for images, labels in batches)
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(256))


def test_early_exit_does_not_wait_for_slow_samples() -> None:
    batches = iter(DataLoader(Numbered(1000, delay_s=0.01), batch_size=100, num_workers=2))
    next(batches)
    workers = batches._workers
    del batches
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_killed_parent_leaves_no_worker_and_no_segment() -> None:
    done = run(
        """
        import os, signal
        from penstock import DataLoader
        from sample_sets import Numbered
        batches = iter(DataLoader(Numbered(1000, delay_s=0.01), batch_size=8, num_workers=2))
        next(batches)
        print(*[worker.pid for worker in batches._workers], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -signal.SIGKILL
    pids = list(map(int, done.stdout.split()))
    for pid in pids:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.02)
    assert done.stderr == ""
    assert not [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


def test_ctrl_c_ends_the_loop_and_the_workers() -> None:
    done = run(
        """
        import os, signal, threading
        from penstock import DataLoader
        from sample_sets import Numbered
        loader = DataLoader(Numbered(1000, delay_s=0.01), batch_size=8, num_workers=2)
        threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()
        try:
            for batch in loader:
                pass
        except KeyboardInterrupt:
            print("interrupted")
        print(sum(1 for _ in DataLoader(Numbered(16), batch_size=8, num_workers=2)))
        """,
        start_new_session=True,
    )
    assert done.stdout == "interrupted\n2\n"
    assert done.stderr == ""


def test_random_states_are_the_workers_own() -> None:
    before = torch.get_rng_state()
    list(DataLoader(Augmented(10), batch_size=2, num_workers=2, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


class Ending(torch.utils.data.IterableDataset[int]):
    """Ends its process after some samples."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        os._exit(3)


@pytest.mark.parametrize("device", [None, "sim"])
def test_a_stream_whose_worker_is_gone_is_one_error_and_then_the_end_and_its_state_is_not_finished(
    device: str | None,
) -> None:
    loader = DataLoader(Ending(), 2, num_workers=1, max_worker_crashes=1, device=device)
    batches = iter(loader)
    with pytest.raises(WorkerKilledError):
        list(batches)
    assert list(batches) == list(batches) == []
    assert loader.state_dict()["finished"] is False
