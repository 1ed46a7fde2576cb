"""The variable of a program that keeps something of each of its steps, and how much."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from types import FrameType

from penstock.observe.doctor.probes.source_lines import Function, parse, statements_at
from penstock.observe.doctor.probes.steps.growing_containers import (
    Container,
    Held,
    find_containers,
    last_elements,
    measure_held,
)
from penstock.observe.doctor.step_results import MemoryGrowth
from penstock.observe.doctor.thresholds import THRESHOLDS

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class MemoryWatch:
    """Compares what the variables of a program lead to before and after windows of its loop, as it was written."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] | None = None
        self._added: Counter[str] = Counter()
        self._steps: list[int] = []

    def begin_window(self, frames: Iterable[FrameType]) -> None:
        """Note what there is before some steps.

        Args:
            frames: the functions of the program that run, innermost first.
        """
        self._before = {name: (id(one.value), one.size) for name, one in find_containers(frames).items()}

    def end_window(self, steps: int, frames: Iterable[FrameType]) -> None:
        """Note what there is after them."""
        if self._before is None or not steps:
            return
        before, self._before = self._before, None
        self._steps.append(steps)
        for name, one in find_containers(frames).items():
            identity, size = before.get(name, (0, 0))
            if identity == id(one.value) and one.size > size:
                self._added[name] += one.size - size

    def result(self, frames: Iterable[FrameType]) -> MemoryGrowth | None:
        """Return what is kept of every step; None where that is little, or nothing is known to be.

        Args:
            frames: as above, in the examined loop.
        """
        own, steps = [*frames], sum(self._steps)
        often = {name for name, added in self._added.items() if added >= max(1, THRESHOLDS.kept_turns * steps)}
        if len(self._steps) < THRESHOLDS.least_windows or not often:
            return None
        found = find_containers(own)
        kept = {name: (_kept(found[name]), found[name]) for name in often if name in found}
        nbytes = {name: held.nbytes * self._added[name] // looks for name, ((held, looks), _) in kept.items()}
        name = max(nbytes, key=lambda name: nbytes[name], default="")
        if nbytes.get(name, 0) < min(THRESHOLDS.kept_nbytes, steps * THRESHOLDS.kept_step_nbytes):
            return None
        (held, _), container = kept[name]
        return MemoryGrowth(
            name=name,
            kind=type(container.value).__name__,
            step_nbytes=nbytes[name] // steps,
            steps=steps,
            has_graph=held.has_graph,
            is_emptied=bool(own) and _is_emptied(name, own),
            is_of_views=2 * held.unused_nbytes > held.nbytes,
        )


class GraphsOfEpochs:
    """Looks for results of a program's epochs that are kept with the graphs that computed them."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._epochs = 0
        self.growth: MemoryGrowth | None = None
        """What keeps the most of an epoch, which counts as a step."""

    def look(self, frames: Iterable[FrameType]) -> None:
        """Note what there is when an epoch begins, and compare it with what there was when the last one did."""
        found = find_containers(frames)
        for name, one in found.items():
            identity, size = self._before.get(name, (0, 0))
            if identity == id(one.value) and one.size > size:
                self._note_growth(name, one, one.size - size)
        self._before = {name: (id(one.value), one.size) for name, one in found.items()}
        self._epochs += 1

    def _note_growth(self, name: str, one: Container, added: int) -> None:
        held, looks = _kept(one)
        nbytes = held.nbytes * added // looks
        least = THRESHOLDS.kept_graph_nbytes if self.growth is None else self.growth.step_nbytes
        if held.has_graph and nbytes >= least:
            self.growth = MemoryGrowth(
                name=name,
                kind=type(one.value).__name__,
                step_nbytes=nbytes,
                steps=self._epochs,
                has_graph=True,
                is_emptied=False,
            )


def _kept(one: Container) -> tuple[Held, int]:
    """Return what the last elements of a container keep alive, what they share once, and how many these are."""
    some = last_elements(one.value, THRESHOLDS.kept_looks)
    held = measure_held(some)
    has_graphs = bool(some) and all(measure_held(part).has_graph for part in some)
    return Held(held.nbytes, held.unused_nbytes, has_graphs), max(1, len(some))


def _is_emptied(name: str, frames: list[FrameType]) -> bool:
    """Return whether what has this name may begin anew in each epoch, as far as the program's files say."""
    innermost, last = frames[0], re.split(r"[. ]", name.partition("[")[0])[-1]
    if name in innermost.f_code.co_varnames and not _is_in_epochs(innermost):
        return True
    return any(_empties(last, file) for file in {frame.f_code.co_filename for frame in frames})


def _is_in_epochs(frame: FrameType) -> bool:
    """Return whether the function that loops over batches loops over epochs, too."""
    around = statements_at(frame.f_code.co_filename, frame.f_lineno)
    own = itertools.takewhile(lambda one: not isinstance(one, Function), around)
    return sum(isinstance(one, _LOOPS) for one in own) > 1


def _empties(name: str, file: str) -> bool:
    """Return whether a file assigns to a name twice, or in a loop, or takes anything out of what it stands for."""
    try:
        tree = parse(file)
    except (SyntaxError, ValueError):
        return True
    nodes = [*ast.walk(tree)]
    takes_out = {"clear", "cache_clear", "pop", "popitem", "popleft", "remove", "discard"}
    if any(isinstance(one, ast.Attribute) and one.attr in takes_out and _name_of(one.value) == name for one in nodes):
        return True
    if any(isinstance(one, ast.Delete) and any(_is_of(name, target) for target in one.targets) for one in nodes):
        return True
    loops = [one for one in nodes if isinstance(one, _LOOPS)]
    return sum(_assigns(name, one) for one in tree.body) > 1 or any(_assigns(name, one) for one in loops)


def _assigns(name: str, around: ast.stmt) -> int:
    """Return how many statements give a name, or an attribute of that name, a value."""
    statements = [one for one in ast.walk(around) if isinstance(one, ast.stmt)]
    return sum(any(_name_of(target) == name for target in _targets(one)) for one in statements)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return [part for one in statement.targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return [statement.target] if isinstance(statement, ast.AnnAssign) and statement.value is not None else []


def _is_of(name: str, target: ast.expr) -> bool:
    return _name_of(target.value if isinstance(target, ast.Subscript) else target) == name


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
