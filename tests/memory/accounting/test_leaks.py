"""Leaks are found and their line is named; healthy loops are left in peace."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import watch_leaks

pytestmark = pytest.mark.slow

STEPS = 12


@dataclass(slots=True)
class Transition:
    """A step of an episode, without a `__dict__`."""

    state: Tensor


class Loop:
    """A small training loop, with places to spoil."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.kept: Any = []
        self.cache: dict[int, Tensor] = {}
        self.total: Any = 0.0
        self.batches: Any = None

    def loss(self) -> Tensor:
        found: Tensor = self.model(torch.randn(4, 8)).square().mean()
        return found

    def train(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def appended_loss(loop: Loop, step: int) -> None:
    loss = loop.model(torch.ones(4, 8)).sum()  # leaks
    loop.kept.append(loss)
    loop.train(loss)


def appended_detached_output(loop: Loop, step: int) -> None:
    output = loop.model(torch.ones(4, 8))
    loop.kept.append(output.detach().clone())  # leaks
    loop.train(output.sum())


def added_to_a_total(loop: Loop, step: int) -> None:
    loss = loop.model(torch.ones(4, 8)).exp().sum()  # leaks
    loop.total = loop.total + loss
    loss.backward(retain_graph=True)


def cached_by_step(loop: Loop, step: int) -> None:
    loop.cache[step] = torch.randn(4, 8) * 2  # leaks
    loop.train(loop.model(loop.cache[step]).sum())


def kept_by_a_hook(loop: Loop, step: int) -> None:
    if not hasattr(loop, "handle"):
        loop.handle = loop.model[0].register_forward_hook(lambda m, i, o: loop.kept.append(o * 1))  # leaks
    loop.train(loop.loss())


def set_on_the_model(loop: Loop, step: int) -> None:
    setattr(loop.model, f"seen{step}", torch.full((64,), float(step)))  # leaks
    loop.train(loop.loss())


def captured_by_functions(loop: Loop, step: int) -> None:
    noise = torch.randn(32)  # leaks
    loop.kept.append(lambda: noise.sum())
    loop.train(loop.loss())


def chained_hidden_state(loop: Loop, step: int) -> None:
    if not step:
        loop.total = torch.zeros(4)
    loop.total = loop.model(torch.ones(4, 8)).mean(0) * 0.5 + loop.total.sin()  # leaks
    loop.total.sum().backward(retain_graph=True)


def copied_weights(loop: Loop, step: int) -> None:
    loop.train(loop.loss())
    loop.kept.append({name: value.clone() for name, value in loop.model.state_dict().items()})  # leaks


def kept_gradients(loop: Loop, step: int) -> None:
    loop.train(loop.loss())
    loop.kept.append([p.grad * 1 for p in loop.model.parameters() if p.grad is not None])  # leaks


def added_up_after_backward(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.train(loss)
    loop.total = loop.total + loss  # leaks


def added_up_in_place(loop: Loop, step: int) -> None:
    if step == 0:
        loop.total = torch.zeros(())
    loss = loop.loss()
    loop.train(loss)
    loop.total += loss  # leaks


def kept_every_third(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.train(loss)
    if step % 3 == 0:
        loop.kept.append(torch.exp(loss.detach()))  # leaks


def batches_of_workers(loop: Loop, step: int) -> None:
    if step == 0:
        data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 8))
        loop.batches = iter(torch.utils.data.DataLoader(data, 4, num_workers=1))
    (x,) = next(loop.batches)  # leaks
    loop.kept.append(x)
    loop.train(loop.model(x).sum())


LEAKS = [
    appended_loss, appended_detached_output, added_to_a_total, cached_by_step, kept_by_a_hook, set_on_the_model,
    captured_by_functions, chained_hidden_state, copied_weights, kept_gradients, added_up_after_backward,
    added_up_in_place, kept_every_third, batches_of_workers,
]  # fmt: skip


def plain(loop: Loop, step: int) -> None:
    loop.train(loop.loss())


def item_appended(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.kept.append(loss.item())
    loop.train(loss)


def last_few_kept(loop: Loop, step: int) -> None:
    loop.kept = loop.kept or deque(maxlen=4)
    loss = loop.loss()
    loop.kept.append(loss.detach().clone())
    loop.train(loss)


def total_in_place(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.total = loop.total + loss.detach()
    loop.train(loss)


def averaged_weights(loop: Loop, step: int) -> None:
    if not step:
        loop.kept = [p.detach().clone() for p in loop.model.parameters()]
    loop.train(loop.loss())
    for mean, p in zip(loop.kept, loop.model.parameters(), strict=True):
        mean.lerp_(p.detach(), 0.1)


def accumulated(loop: Loop, step: int) -> None:
    loop.loss().backward()
    if step % 4 == 3:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def best_kept(loop: Loop, step: int) -> None:
    loss = loop.loss()
    if step in (0, 2, 5):
        loop.kept = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.train(loss)


def evaluated(loop: Loop, step: int) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        outputs = [loop.model(torch.randn(4, 8)) for _ in range(3)]
        loop.total = torch.cat(outputs).mean()


def momentum(loop: Loop, step: int) -> None:
    if not step:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    loop.train(loop.loss())


def cache_of_the_last_batches(loop: Loop, step: int) -> None:
    loop.cache[step % 3] = torch.randn(4, 8) + 1
    loop.train(loop.loss())


def cache_by_length(loop: Loop, step: int) -> None:
    if step % 4 not in loop.cache:
        loop.cache[step % 4] = torch.arange(8.0) * step
    loop.train(loop.loss())


def backward_through_some_time(loop: Loop, step: int) -> None:
    loop.total = loop.total + loop.loss()
    if step % 4 == 3:
        loop.train(loop.total)
        loop.total = loop.total.detach()


def total_of_an_epoch(loop: Loop, step: int) -> None:
    loss = loop.loss()
    loop.total = loss.detach() if step % 4 == 0 else loop.total + loss.detach()
    loop.train(loss)


def replay_buffer_that_fills(loop: Loop, step: int) -> None:
    if not step:
        loop.kept = deque(maxlen=1000)
    loop.kept.append((torch.randn(4, 8) + 1, torch.tensor(0.5 * step)))
    loop.train(loop.model(loop.kept[-1][0]).sum())


def replay_buffer_with_slots(loop: Loop, step: int) -> None:
    if not step:
        loop.kept = deque([Transition], maxlen=1000)  # a class is not one of its instances
    loop.kept.append(Transition(torch.randn(4, 8) + 1))
    loop.train(loop.model(loop.kept[-1].state).sum())


def replay_buffer_of_places(loop: Loop, step: int) -> None:
    if not step:
        loop.kept = [None] * 1000
    loop.kept[step] = {"state": torch.randn(4, 8) + 1}
    loop.train(loop.model(loop.kept[step]["state"]).sum())


def lazily_made_state(loop: Loop, step: int) -> None:
    """Train another expert in each step, so that the optimizer makes the state of another parameter."""
    if not step:
        loop.batches = nn.ModuleList(nn.Linear(8, 4) for _ in range(STEPS))
        loop.optimizer = torch.optim.Adam(loop.batches.parameters())
    loop.train(loop.batches[step](torch.ones(2, 8)).sum())


HEALTHY = [
    plain, item_appended, last_few_kept, total_in_place, averaged_weights, accumulated, best_kept, evaluated, momentum,
    cache_of_the_last_batches, cache_by_length, backward_through_some_time, total_of_an_epoch,
    replay_buffer_that_fills, replay_buffer_with_slots, replay_buffer_of_places, lazily_made_state,
]  # fmt: skip


def watched(body: Callable[[Loop, int], None]) -> list[Any]:
    loop = Loop()
    with watch_leaks() as leaks:
        for step in range(STEPS):
            body(loop, step)
            leaks.step()
    return leaks.found()


@pytest.mark.parametrize("body", LEAKS, ids=lambda body: body.__name__)
def test_a_leak_is_found_on_its_line(body: Callable[[Loop, int], None]) -> None:
    found = watched(body)
    lines, first = inspect.getsourcelines(body)
    expected = next(first + number for number, line in enumerate(lines) if "# leaks" in line)
    assert any(leak.line.startswith(f"test_leaks.py:{expected}: ") for leak in found), [str(leak) for leak in found]
    assert all(leak.nbytes > 0 and leak.steps >= 3 for leak in found)


@pytest.mark.parametrize("body", HEALTHY, ids=lambda body: body.__name__)
def test_a_healthy_loop_has_no_leak(body: Callable[[Loop, int], None]) -> None:
    assert [str(leak) for leak in watched(body)] == []


def test_a_leak_that_keeps_its_graph_is_reported_with_its_holder() -> None:
    found = watched(appended_loss)
    text = "\n".join(map(str, found))
    assert f"held by a list of {STEPS}; they keep their graph: keep loss.item() or loss.detach() instead" in text
    assert all(not leak.keeps_graph for leak in watched(appended_detached_output))
