"""Workers on the machines of a real Ray cluster, whose machines are processes here: they come, go and vanish.

The scripts run one after another in one program, which imports torch and Ray once, and in which each has to leave Ray
disconnected. Their order goes by how many machines they need, since a machine takes a second to start; it matters for
nothing else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import HOLDERS, held
from program import running
from scripts import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

PRELUDE = """
import warnings; warnings.simplefilter("error")
warnings.filterwarnings("ignore", "no Ray worker has started")  # a loaded machine takes long to import torch
import gc, os, time
import torch
from sample_sets import *

def augmented(kind, **own):
    return kind(Augmented(40), 8, True, num_workers=2, generator=torch.Generator().manual_seed(5), **own)

# torch's own workers are forked before this process has ever been connected to Ray, whose threads do not survive that.
TORCHS_AUGMENTED = list(augmented(torch.utils.data.DataLoader))
TORCHS_STREAM = [numbers.tolist() for _, numbers in torch.utils.data.DataLoader(Stream(90), 5, num_workers=2)]

import penstock, ray
import penstock.cluster.placement as placement
from machines import Machines
from penstock import DataLoader, TransportError
machines = Machines.here()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment of programs that use the cluster of this module."""
    with held(tmp_path_factory.mktemp("cluster")) as environment:
        yield environment


@pytest.fixture(scope="module")
def on_cluster(cluster: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Return what runs a script beside the cluster and gives what it says, a line for each call of `say`."""
    with running(PRELUDE, cluster, Path(cluster["RAY_TMPDIR"], "program"), HOLDERS) as program:

        def run_script(code: str) -> str:
            answer = program.run(code)
            assert program.run("gc.collect(); say(ray.is_initialized())") == ["False"]
            return "\n".join(answer)

        yield run_script


def test_more_workers_than_cores_wait_without_delaying_the_others(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have(1)
        loader = DataLoader(Numbered(60), 5, num_workers=6, worker_type="ray", dispatch="demand")
        say([int(label) for _, numbers in loader for label in numbers] == list(range(60)))
        """
    )
    assert answer == "True"


def test_batches_are_made_of_the_scripts_own_classes(on_cluster) -> None:
    answer = on_cluster(
        """
        from collections import namedtuple
        Picture = namedtuple("Picture", ["pixels", "number"])  # which the machines cannot import
        Picture.__module__ = "__main__"
        class Pictures(Numbered):
            def __getitem__(self, index):
                return Picture(*super().__getitem__(index))

        import __main__
        __main__.Picture = Picture
        machines.have_at_least(1)
        loader = DataLoader(Pictures(60), 5, num_workers=1, worker_type="ray")
        for number, batch in enumerate(loader):
            assert type(batch) is Picture and batch.number[0] == batch.pixels[0, 0, 0, 0]
            if number == 3:
                del __main__.Picture  # as where a Ray task runs a script's function
        say("own")
        """
    )
    assert answer == "own"


def test_a_connection_that_the_program_ends_is_an_error_and_not_opened_again(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have_at_least(1)
        loader = DataLoader(Numbered(300, delay_s=0.01), 5, num_workers=1, worker_type="ray", persistent_workers=True)
        batches = iter(loader)
        next(batches)
        ray.shutdown()
        for again in (batches, loader):
            try:
                list(again)
            except TransportError as error:
                say("ray.shutdown" in str(error), ray.is_initialized())
        ray.init(logging_level="error")
        del loader, batches, again
        gc.collect()
        say("the program's own", ray.is_initialized())
        ray.shutdown()
        """
    )
    assert answer.splitlines() == ["True False", "True False", "the program's own True"]


def test_a_dataset_that_cannot_travel_is_a_short_error(on_cluster) -> None:
    answer = on_cluster(
        """
        import threading
        class Locked(Numbered):
            lock = None
        dataset = Locked(10)
        dataset.lock = threading.Lock()
        try:
            iter(DataLoader(dataset, 5, num_workers=1, worker_type="ray"))
        except penstock.UnpicklableError as error:
            say("cannot pickle '_thread.lock' object; leave out" in str(error), len(str(error)) < 300)
        """
    )
    assert answer == "True True"


def test_a_program_that_fails_in_the_middle_of_an_epoch_ends(cluster) -> None:
    code = """
        import time
        import penstock.cluster.ray_pool as pool
        from machines import Machines
        from penstock import DataLoader
        from sample_sets import Numbered

        class Hanging(Numbered):
            def __getitem__(self, index):
                time.sleep(1000 * (index == 7))
                return super().__getitem__(index)

        pool._LEAVE_S = 0.5
        Machines.here().have_at_least(1)
        for images, numbers in DataLoader(Hanging(60), 5, num_workers=1, worker_type="ray"):
            raise ZeroDivisionError("in the training step")
    """
    done = run(code, environment=cluster)
    assert done.returncode == 1
    assert "ZeroDivisionError: in the training step" in done.stderr


def test_workers_start_when_machines_join(on_cluster) -> None:
    answer = on_cluster(
        """
        class Signed(Numbered):
            def __getitem__(self, index):
                time.sleep(0.004)
                return index, os.getpid()

        machines.have(1)
        loader = DataLoader(Signed(1_000_000), 10, num_workers=(1, 3), worker_type="ray", dispatch="demand")
        labels, makers = [], set()
        for numbers, pids in loader:
            labels += numbers.tolist()
            makers |= {*pids.tolist()}
            if len(labels) == 10:
                assert loader.statistics().workers == 1
                machines.have(3)
            if len(makers) == 3:
                break
        say(labels == list(range(len(labels))), loader.statistics().workers)
        """
    )
    assert answer == "True 3"


def test_an_exception_of_a_sample_is_the_same_as_from_a_local_worker(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have_at_least(2)
        loader = DataLoader(Raising(20), 5, num_workers=1, worker_type="ray", errors="skip")
        left_out = iter(loader)  # both ask for their worker at once
        try:
            list(DataLoader(Raising(20), 5, num_workers=1, worker_type="ray"))
        except OSError as error:
            say("sample 3 is corrupt" in str(error) and "Traceback" in str(error), "worker process 0" in str(error))
        say([len(numbers) for _, numbers in left_out], loader.statistics().skipped_indices)
        """
    )
    assert answer.splitlines() == ["True True", "[4, 5, 4, 5] (3, 13)"]


def test_batches_are_torchs_bit_for_bit_where_samples_depend_on_their_worker(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have_at_least(2)
        loader = augmented(DataLoader, worker_type="ray")
        mine = list(loader)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(mine, TORCHS_AUGMENTED, strict=True) for name in a)
        say(loader.statistics().dispatch)
        """
    )
    assert answer == "round_robin"


def test_a_sample_that_kills_workers_is_named_and_its_machine_is_not_blamed(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have_at_least(2)
        own = dict(worker_type="ray", dispatch="demand", errors="skip", max_worker_crashes=2)
        loader = DataLoader(Deadly(64), 8, num_workers=2, **own)
        labels = [int(label) for _, numbers in loader for label in numbers]
        say(labels == [label for label in range(64) if label != 37], loader.statistics().quarantined)
        """
    )
    assert answer == "True (37,)"


def test_epochs_given_up_large_batches_and_closing_leave_nothing_behind(on_cluster) -> None:
    answer = on_cluster(
        """
        machines.have_at_least(2)
        class Swelling(Numbered):  # of this script, which no machine can import
            def __getitem__(self, index):
                return torch.full((5000 * (1 + index // 2),), float(index // 2))

        loader = DataLoader(Swelling(40), 2, num_workers=2, worker_type="ray", persistent_workers=True)
        for taken in range(12):  # given up, with batches under way
            for number, _ in enumerate(loader):
                if number == taken % 4:
                    break
        for _ in range(2):
            kept = list(loader)
            assert [int(batch[0, 0]) for batch in kept] == list(range(20))
        say("oversize", loader.statistics().ring.oversize > 0, "restarts", loader.statistics().restarts)
        del loader
        gc.collect()
        assert [int(batch[0, 0]) for batch in kept] == list(range(20))
        say("connected", ray.is_initialized())
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="error")
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
            time.sleep(0.1)  # until the test's time is up
        ray.shutdown()
        say("free")
        """
    )
    assert answer.splitlines() == ["oversize True restarts 0", "connected False", "free"]


def test_through_rays_client_server_batches_order_and_errors_are_the_same(cluster) -> None:
    code = """
        import socket, subprocess, sys, time
        from machines import Machines
        from penstock import DataLoader
        from sample_sets import Raising

        def answers():
            with socket.socket() as line:
                return line.connect_ex(("127.0.0.1", port)) == 0

        Machines.here().have_at_least(2)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # One client's server, as the proxy of a head starts one for each client. It does so by forking, which
        # grpcio does not always survive.
        command = [sys.executable, "-m", "ray.util.client.server", "--mode=legacy", "--host=127.0.0.1"]
        server = subprocess.Popen([*command, f"--port={port}", f"--address={Machines.here().address()}"])
        try:
            while not answers():
                time.sleep(0.1)  # until the test's time is up
            loader = DataLoader(
                Raising(100, shape=(3, 100, 100)), 5, num_workers=2, worker_type=f"ray://127.0.0.1:{port}",
                persistent_workers=True, errors="skip",
            )
            for images, numbers in loader:
                break
            batches = list(loader)
            assert all((images[:, 0, 0, 0] == numbers).all() for images, numbers in batches)
            labels = [int(number) for _, numbers in batches for number in numbers]
            assert labels == [number for number in range(100) if number % 10 != 3], labels
            del loader
            print("whole")
        finally:
            server.kill()
            server.wait()
    """
    environment = {name: value for name, value in cluster.items() if name != "RAY_ADDRESS"}
    done = run(code, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "whole" in done.stdout


def test_a_machine_that_vanishes_takes_no_sample_with_it_and_leaves_the_order(on_cluster, tmp_path) -> None:
    answer = on_cluster(
        f"""
        from pathlib import Path
        folder = Path({str(tmp_path)!r})

        class Fateful(Numbered):  # two samples name the machine that has begun them, and then wait for its end
            def __getitem__(self, index):
                note = folder / str(index)
                if index in (45, 125) and not note.exists():
                    note.with_suffix(".new").write_text(ray.get_runtime_context().get_node_id())
                    note.with_suffix(".new").rename(note)
                    time.sleep(1000)
                return super().__getitem__(index)

        machines.have_at_least(3)
        loader = DataLoader(Fateful(300), batch_size=10, num_workers=3, worker_type="ray", dispatch="demand")
        labels = []
        for number, (images, numbers) in enumerate(loader):
            assert torch.equal(images.flatten(1)[:, 0], numbers.float())
            labels += numbers.tolist()
            if number in (3, 11):  # the next batch is the one that waits
                note = folder / {{3: "45", 11: "125"}}[number]
                while not note.exists():
                    time.sleep(0.01)  # until the test's time is up
                machines.kill(note.read_text())
        assert labels == list(range(300)), labels
        counted = loader.statistics()
        assert counted.restarts >= 2 and counted.retried >= 2 and not counted.quarantined, counted
        say("whole")
        """
    )
    assert answer == "whole"


def test_a_stream_continues_where_its_machine_vanished(on_cluster) -> None:
    answer = on_cluster(
        """
        from unittest import mock
        first, second = machines.have(2)
        loader = DataLoader(
            Stream(90, delay_s=0.02), 5, num_workers=2, worker_type="ray", worker_init_fn=lambda worker: None
        )
        indices = []
        with mock.patch.object(placement, "CORE_WAIT_S", placement.CORE_WAIT_S):
            for number, (_, numbers) in enumerate(loader):
                indices.append(numbers.tolist())
                if number == 5:
                    placement.CORE_WAIT_S = 0.3  # with no core left, the successor shares one
                    machines.kill(second)
        assert indices == TORCHS_STREAM, indices
        say("restarts", loader.statistics().restarts > 0)
        """
    )
    assert answer == "restarts True"


def test_the_cluster_of_these_tests_listens_on_this_machine_only(on_cluster) -> None:
    answer = on_cluster(
        """
        import psutil
        cluster = {p.pid for p in psutil.Process(os.getppid()).children(recursive=True)}  # forked by one server
        names = [one.info["name"] for one in psutil.process_iter(["name"]) if one.pid in cluster]  # some end meanwhile
        assert sum("raylet" in name for name in names) >= 2, "the head and a machine"
        listens = [one for one in psutil.net_connections("tcp") if one.pid in cluster and one.status == "LISTEN"]
        say({one.laddr.ip.removeprefix("::ffff:") for one in listens})
        """
    )
    assert answer == "{'127.0.0.1'}"
