"""Limits of the machine and of the user: each is enough, or one clear error that says what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sample_sets import Growing, Numbered
from scripts import run

from penstock import DataLoader, TransportError
from penstock.observe.meters.host_memory import descendants, pss_nbytes

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_over_the_rings_budget_is_one_clear_error(workers: int) -> None:
    with pytest.raises(
        TransportError, match=r"a batch of \d.* does not fit the ring's 1.0 MiB budget; raise ring_bytes"
    ):
        list(DataLoader(Numbered(64, (3, 100, 100)), batch_size=32, num_workers=workers, ring_bytes=1 << 20))


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


def test_more_workers_than_there_are_descriptors_for_is_one_clear_error() -> None:
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


def test_more_workers_than_the_system_has_processes_for_is_one_clear_error() -> None:
    done = run(
        """
        import multiprocessing, multiprocessing.popen_fork, os, resource, warnings
        warnings.simplefilter("ignore")
        from penstock import DataLoader, PenstockError
        from sample_sets import Numbered
        resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
        if os.getuid() == 0:  # whom no limit holds
            os.setgid(65534)
            os.setuid(65534)
        try:
            list(DataLoader(Numbered(400), num_workers=1000))
        except PenstockError as error:
            print(error)
        print(multiprocessing.active_children())
        """
    )
    assert "of 1000 could not be started" in done.stdout, done.stderr
    assert "lower num_workers" in done.stdout
    assert done.stdout.endswith("\n[]\n")
    assert done.stderr == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_little_address_space_is_enough(workers: int) -> None:
    done = run(
        f"""
        import resource
        import torch
        from penstock import DataLoader
        from sample_sets import Numbered
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
        batches = DataLoader(Numbered(400, (3, 64, 64)), batch_size=8, num_workers={workers})
        print(all(torch.equal(images[:, 0, 0, 0], labels.float()) for images, labels in batches))
        """
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("limit", "words"), [("RLIMIT_FSIZE", "`ulimit -f`"), ("RLIMIT_AS", "lower batch_size, prefetch_factor")]
)
def test_no_memory_for_any_segment_is_one_clear_error(limit: str, words: str) -> None:
    done = run(
        f"""
        import resource
        from penstock import DataLoader, PenstockError
        from sample_sets import Numbered
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        allowed = used + (3 << 20) if "{limit}" == "RLIMIT_AS" else 65536
        batches = DataLoader(Numbered(40, (3, 64, 64)), batch_size=8, num_workers=2, multiprocessing_context="fork")
        resource.setrlimit(resource.{limit}, (allowed, allowed))
        try:
            list(batches)
        except PenstockError as error:
            print(error)
        """
    )
    assert "no segment of" in done.stdout, done.stderr
    assert words in done.stdout


@pytest.mark.parametrize("collate_fn", [None, list])
def test_a_dev_shm_that_is_full_does_not_matter(collate_fn) -> None:
    own_dev_shm = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=300k tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*own_dev_shm, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    done = run(
        f"""
        import os
        from penstock import DataLoader
        from sample_sets import Numbered
        collate_fn = {collate_fn.__name__ if collate_fn else None}
        print(len(list(DataLoader(Numbered(40, (3, 64, 64)), batch_size=8, num_workers=2, collate_fn=collate_fn))))
        print(os.listdir("/dev/shm"))
        """,
        *own_dev_shm,
    )
    assert done.stdout == "5\n[]\n", done.stderr


def test_a_full_disk_stops_no_epoch_and_loses_only_run_json(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    fill = f"mount -t tmpfs -o size=16k tmpfs {full} && (head -c 99999 /dev/zero > {full}/filling || true)"
    full_disk = ("unshare", "--mount", "sh", "-c", f'{fill} 2> /dev/null && cd {full} && exec "$@"', "sh")
    if subprocess.run([*full_disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "for method in ('fork', 'forkserver', 'spawn'):\n"
        "    if __name__ == '__main__':\n"
        "        loader = DataLoader(torch.zeros(64, 3, 128, 128), 8, num_workers=2, multiprocessing_context=method)\n"
        "        print(method, len(list(loader)), flush=True)\n"
    )
    done = subprocess.run(
        [*full_disk, sys.executable, "-m", "penstock", "run", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(full)},
        check=False,
    )
    assert done.stdout == "fork 8\nforkserver 8\nspawn 8\n", done.stderr
    assert "run.json cannot be written: No space left on device" in done.stderr
    assert done.returncode == 0


def shared_files(pid: int) -> list[str]:
    """Name the files of /dev/shm that a process has mapped; other tests' processes have theirs there, too."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [line.rpartition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line]


def test_ten_thousand_batches_of_changing_sizes_leave_everything_flat() -> None:
    loader = DataLoader(Growing(20_000), batch_size=2, num_workers=2)
    looks = []
    for number, batch in enumerate(loader):
        assert bool((batch == number).all())
        if number in (1000, 9990):
            family = [os.getpid(), *descendants(os.getpid())]
            # Workers that run further ahead (a loaded machine) take another segment: two descriptors in each process.
            of_ring = 2 * (1 + loader.num_workers) * loader.statistics().ring.segments
            looks.append(
                {
                    "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family) - of_ring,
                    "processes": len(family),
                    "segments": len({name for pid in family for name in shared_files(pid)}),
                    "MiB": sum(pss_nbytes(pid) or 0 for pid in family) >> 20,
                }
            )
    assert number == 9999
    early, late = looks
    assert {**late, "MiB": 0} == {**early, "MiB": 0}
    assert late["MiB"] <= early["MiB"] + 16
