"""torch.compile passes over penstock's code, in this process and in workers, and penstock imports nothing of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python", "fresh_python")

PROGRAM = """
    import sys
    import torch, penstock

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return (torch.full((3,), float(index)),)

    def total(loader):
        found = 0.0
        for (rows,) in loader:
            found = found + rows.sum()
        return found

    loaders = [penstock.DataLoader(Rows(), 4, num_workers=workers) for workers in (0, 1)]
    assert len(list(loaders[0])) == 2
    assert "torch._dynamo.trace_rules" not in sys.modules, "penstock has imported dynamo"
    compiled = torch.compile(total, backend="eager")
    later = penstock.DataLoader(Rows(), 4, num_workers=1)
    assert [compiled(loader).item() for loader in (*loaders, later)] == [84.0, 84.0, 84.0]
    from torch._dynamo import trace_rules
    from penstock.loader import iterator
    from penstock.memory import train_step
    assert trace_rules.check(iterator.LoaderIterator.__next__)
    assert not trace_rules.check(train_step.TrainStep.__call__)
    print("done")
"""


def test_a_compiled_function_loops_over_a_loader_with_and_without_workers() -> None:
    program = textwrap.dedent(PROGRAM)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr
