"""Workers may die, hang or never start; the epoch ends with exactly its samples, or with one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from sample_sets import Arrays, Augmented, Deadly, Growing, Hanging, Numbered, Stream, Unpicklable
from torch.utils.data import default_collate

import penstock.feed.loader as feed_loader
from penstock import (
    DataLoader,
    TransportError,
    UnpicklableError,
    WorkerKilledError,
    WorkerStartError,
    WorkerTimeoutError,
)

TESTS = Path(__file__).parents[1]


def under_fire(loader: DataLoader, every_s: float = 0.15) -> list[int]:
    """Return the labels of an epoch during which a worker is killed every so often."""
    batches, over = iter(loader), threading.Event()

    def shoot() -> None:
        number = 0
        while not over.wait(every_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(batches._workers[number % len(batches._workers)].pid, signal.SIGKILL)
            number += 1

    shooter = threading.Thread(target=shoot)
    shooter.start()
    try:
        labels = []
        for images, numbers in batches:
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
    loader = DataLoader(Hanging(20), batch_size=2, num_workers=2, timeout=0.5, multiprocessing_context="fork")
    batches = iter(loader)
    with pytest.raises(
        WorkerTimeoutError, match=r"DataLoader timed out after 0.5 seconds; worker \d \(pid \d+\) is at sample 5"
    ):
        list(batches)
    for process in batches._workers:
        process.kill()


def die_at_once(worker: int) -> None:
    os._exit(7)


def test_workers_that_never_live_are_one_clear_error() -> None:
    with pytest.raises(WorkerStartError, match="exited unexpectedly with code 7"):
        list(DataLoader(Numbered(8), num_workers=2, worker_init_fn=die_at_once))


def test_an_error_keeps_its_place_and_its_traceback() -> None:
    def sampler():
        yield from range(6)
        raise LookupError("no more")

    batches = iter(DataLoader(Numbered(20), batch_size=2, sampler=sampler(), num_workers=2))
    assert [next(batches)[1].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(LookupError, match="no more"):
        next(batches)


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


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_over_the_rings_budget_is_one_clear_error(workers: int) -> None:
    with pytest.raises(
        TransportError, match=r"a batch of \d.* does not fit the ring's 1.0 MiB budget; raise ring_bytes"
    ):
        list(DataLoader(Numbered(64, (3, 100, 100)), batch_size=32, num_workers=workers, ring_bytes=1 << 20))


@pytest.mark.parametrize("collate_fn", [None, default_collate, list])
def test_without_memfd_named_segments_do(monkeypatch: pytest.MonkeyPatch, collate_fn) -> None:
    monkeypatch.setattr(feed_loader, "memfd_works", lambda: False)
    loader = DataLoader(Numbered(200, (3, 64, 64)), batch_size=20, num_workers=2, collate_fn=collate_fn)
    kept = list(loader)
    if collate_fn is not list:
        assert [int(i) for _, labels in kept for i in labels] == list(range(200))
        assert all(torch.equal(images[:, 2, 63, 63], labels.float()) for images, labels in kept)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_start_method_pickles_the_dataset_at_most_once(method: str) -> None:
    Arrays.pickled = 0
    dataset = Arrays()
    batches = list(DataLoader(dataset, batch_size=16, num_workers=3, multiprocessing_context=method))
    assert Arrays.pickled == (0 if method == "fork" else 1)
    assert all(torch.equal(images, dataset.images[labels % 64]) for images, labels in batches)
    assert torch.cat([labels for _, labels in batches]).tolist() == list(range(256))


def test_changing_sizes_leave_descriptors_flat() -> None:
    loader = DataLoader(Growing(4000), batch_size=2, num_workers=2)
    early = 0
    for number, batch in enumerate(loader):
        assert bool((batch == number).all())
        if number == 100:
            early = len(os.listdir("/proc/self/fd"))
    assert loader.statistics().ring.slabs <= 3
    assert len(os.listdir("/proc/self/fd")) <= early


def test_early_exit_does_not_wait_for_slow_samples() -> None:
    batches = iter(DataLoader(Numbered(1000, delay_s=0.01), batch_size=100, num_workers=2))
    next(batches)
    workers = batches._workers
    del batches
    assert [worker.exitcode for worker in workers] == [0, 0]


def run(code: str, **arguments) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        **arguments,
    )


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


def test_a_limit_of_64_descriptors_is_enough() -> None:
    done = run(
        """
        import resource
        import torch
        from penstock import DataLoader
        from sample_sets import Numbered
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept = list(DataLoader(Numbered(400, (3, 64, 64)), batch_size=2, num_workers=4))
        print(len(kept), all(torch.equal(x[:, 0, 0, 0], y.float()) for x, y in kept))
        """
    )
    assert done.stdout == "200 True\n", done.stderr


def test_more_workers_than_the_system_allows_is_one_clear_error() -> None:
    done = run(
        """
        import resource, warnings
        warnings.simplefilter("ignore")
        from penstock import DataLoader, PenstockError
        from sample_sets import Numbered
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        try:
            list(DataLoader(Numbered(400), num_workers=1000))
        except PenstockError as error:
            print(error)
        """
    )
    assert "ulimit -n" in done.stdout, done.stderr


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
