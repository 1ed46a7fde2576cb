"""Rows of a Ray Data dataset reach the loader, each once, whatever the ranks; on a Ray cluster of this machine."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from machines import held
from scripts import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

PRELUDE = """
import warnings; warnings.simplefilter("error", UserWarning)  # as torch warns of memory that is read only
import os, torch, numpy as np
import ray
import ray.data
import penstock
from machines import Machines
Machines.here().have_at_least(1)
ray.init(log_to_driver=False, logging_level="error")
ray.data.DataContext.get_current().enable_progress_bars = False
numbers = ray.data.range(1000, override_num_blocks=4)
table = numbers.map(lambda row: {**row, "image": np.full((4, 5), row["id"], np.float32), "name": f"n{row['id']}"})
"""


@pytest.fixture(scope="module")
def on_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Return what runs a script, once for each set of variables, and gives what each of them said."""
    with held(tmp_path_factory.mktemp("cluster")) as environment:

        def run_one(code: str, more: dict[str, str]) -> str:
            done = run(PRELUDE + textwrap.dedent(code), environment={**environment, **more})
            assert done.returncode == 0, done.stderr[-4000:]
            return done.stdout

        def run_all(code: str, *variables: dict[str, str]) -> list[str]:
            with ThreadPoolExecutor() as threads:
                return list(threads.map(lambda more: run_one(code, more), variables or ({},)))

        yield run_all


def test_rows_and_batches_are_those_of_ray_data(on_cluster) -> None:
    said = on_cluster(
        """
        loader = penstock.DataLoader(penstock.ray_dataset(table), batch_size=64)
        for _ in range(2):
            batches = list(loader)
            assert sorted(int(i) for batch in batches for i in batch["id"]) == list(range(1000))
            assert all((batch["image"] == batch["id"][:, None, None]).all() for batch in batches)
            assert all(batch["name"] == [f"n{i}" for i in batch["id"].tolist()] for batch in batches)
        whole = penstock.ray_dataset(table, batch_size=300, columns=["id", "image"], drop_last=True)
        batches = list(penstock.DataLoader(whole, batch_size=None))
        print([tuple(batch["image"].shape) for batch in batches], sorted(batches[0]))
        kept = penstock.ray_dataset(numbers.materialize(), batch_size=250, writable=True)
        for _ in range(2):  # what the program writes to is its own, and not Ray's, for the next epoch
            assert sum(int(batch["id"].sum()) for batch in kept) == 999 * 500
            for batch in kept:
                batch["id"] += 1
        torch.utils.data._utils.worker._worker_info = object()  # as in a worker process
        try:
            iter(penstock.ray_dataset(numbers))
        except penstock.OptionError as error:
            print("num_workers=0" in str(error))
        """
    )
    assert said == ["[(300, 4, 5), (300, 4, 5), (300, 4, 5)] ['id', 'image']\nTrue\n"]


def test_batches_are_iter_torch_batches_own_wherever_blocks_end(on_cluster) -> None:
    said = on_cluster(
        """
        import pyarrow as pa
        ray.data.DataContext.get_current().execution_options.preserve_order = True

        def column(first, count, number):
            return pa.array([None if number == 1 and i == 2 else first + i for i in range(count)], pa.int64())

        sizes = [7, 40, 3, 1, 50, 25]  # rows of the blocks
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        blocks = [
            pa.table({"n": column(start, size, number), "x": pa.array(np.arange(start, start + size) / 3)})
            for number, (start, size) in enumerate(zip(starts, sizes))
        ]
        numbers = ray.data.from_arrow(blocks)
        tensors = ray.data.from_numpy([np.random.rand(size, 3, 2).astype(np.float32) for size in sizes])
        flags = ray.data.from_items([{"flag": i % 3 == 0} for i in range(60)], override_num_blocks=4)
        many = numbers.map_batches(lambda batch: batch, batch_size=4)  # blocks of several pieces
        for name, ds in {"numbers": numbers, "tensors": tensors, "flags": flags, "many": many}.items():
            kept = ds.materialize()
            for rows in (1, 10, 25, 64, 200):
                for drop_last in (False, True):
                    options = {"batch_size": rows, "drop_last": drop_last}
                    theirs = list(kept.iter_torch_batches(**options))
                    for writable in (True, False):
                        ours = list(penstock.ray_dataset(kept, writable=writable, **options))
                        assert len(ours) == len(theirs), (name, options, len(ours), len(theirs))
                        for one, other in zip(ours, theirs):
                            assert list(one) == list(other)
                            for key in one:
                                torch.testing.assert_close(one[key], other[key], rtol=0, atol=0, equal_nan=True)
                for batch in penstock.ray_dataset(kept, batch_size=rows, writable=True):
                    for tensor in batch.values():
                        tensor.fill_(1)  # the program's own memory: the next epoch has what this one had
        shuffled = penstock.ray_dataset(
            numbers, batch_size=10, columns=["x"], local_shuffle_buffer_size=50, local_shuffle_seed=0
        )
        batches = list(shuffled)
        mixed = torch.cat([batch["x"] for batch in batches])
        assert [len(batch["x"]) for batch in batches] == [10] * 12 + [6]
        assert sorted(mixed.tolist()) == (torch.arange(126, dtype=torch.float64) / 3).tolist() != mixed.tolist()
        print("equal")
        """
    )
    assert said == ["equal\n"]


def test_batches_are_views_as_iter_torch_batches_are_and_writing_to_one_is_said(on_cluster) -> None:
    said = on_cluster(
        """
        kept = ray.data.from_numpy([np.zeros((64, 1000), np.float32) for _ in range(2)]).materialize()

        def addresses(batches):
            return {tensor.data_ptr() for batch in batches for tensor in batch.values()}

        views = penstock.ray_dataset(kept, batch_size=64)
        held = [*penstock.DataLoader(views, batch_size=None)]
        assert addresses(held) == addresses(kept.iter_torch_batches(batch_size=64))
        assert not addresses(held) & addresses(penstock.ray_dataset(kept, batch_size=64, writable=True))
        total = 0.0
        for batch in views:  # reading says nothing, and neither does writing to what Ray has copied
            total += float((batch["data"] + 1).sum()) - 64_000
        for batch in penstock.ray_dataset(kept, batch_size=100):
            if len(batch["data"]) == 100:
                batch["data"].add_(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in penstock.DataLoader(views, batch_size=None):
                batch["data"].add_(1)
            with torch.inference_mode():
                [*views]
        print(total, len(caught), "writable=True" in str(caught[0].message), caught[0].category.__name__)
        print(*{float(batch["data"].mean()) for batch in kept.iter_torch_batches(batch_size=64)})
        """
    )
    assert said == ["0.0 1 True UserWarning\n1.0\n"]


def test_ranks_share_out_one_execution_so_that_each_row_comes_once_an_epoch(on_cluster, tmp_path) -> None:
    said = on_cluster(
        f"""
        import torch.distributed as dist
        dataset = penstock.ray_dataset(numbers)
        try:
            iter(dataset)
        except penstock.OptionError as error:
            assert "init_process_group" in str(error)
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=rank, world_size=2)
        loader = penstock.DataLoader(dataset, batch_size=50)
        for _ in range(2):
            mine = [int(i) for batch in loader for i in batch["id"]]
            all_of_them = [None, None]
            dist.all_gather_object(all_of_them, mine)
            assert all(all_of_them)
            print(sorted(sum(all_of_them, [])) == list(range(1000)))
        dist.barrier()
        print(end="", flush=True)
        os._exit(0)  # without torch's destructors, which deadlock with gloo's thread over Python's lock
        """,
        *({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)),
    )
    assert said == ["True\nTrue\n"] * 2
