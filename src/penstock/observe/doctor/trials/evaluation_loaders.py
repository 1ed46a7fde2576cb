"""The loaders of a program that evaluate: found where its functions hold them when its training loop begins.

An evaluation comes after a whole epoch, which the doctor does not reach. So loaders are looked for in the variables of
the calling functions and of their modules. One evaluates if it was iterated without gradients, or if its name says so,
or if its name says nothing, it does not shuffle, and the training loop does.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from penstock.core.object_attributes import attributes_of, has_attributes
from penstock.core.user_code import is_users
from penstock.observe.doctor.contents.compare_loaders import Evaluation

_EVALUATES = frozenset(
    {"val", "vali", "valid", "validate", "validation", "test", "testing", "dev", "eval", "evaluation", "holdout"}
)
_TRAINS = frozenset({"train", "training", "trn", "fit", "unlabeled", "unlabelled", "labeled", "labelled"})
_MOST_VALUES = 512
_DEPTH = 2
_MOST_NOTED = 8


class EvaluationLoaders:
    """Notes the loaders of a program, their names, and whether they were iterated with gradients."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._loaders: dict[int, DataLoader[Any]] = {}
        self._with_gradients: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._without: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()

    def note_request(self, loader: DataLoader[Any], *, has_gradients: bool) -> None:
        """Note that a loop that is not examined requests a batch."""
        if has_gradients:
            self._with_gradients.add(loader)
        elif loader not in self._without and len(self._without) < _MOST_NOTED:
            self._without.add(loader)
            self._loaders.setdefault(id(loader), loader)  # kept, also if the program makes another one for each pass

    def look_around(self) -> None:
        """Note the loaders that the calling functions hold."""
        frame: FrameType | None = sys._getframe(1)
        modules: set[int] = set()
        while frame is not None:
            if is_users(frame.f_code.co_filename) or frame.f_code.co_filename in ("<string>", "<stdin>"):
                self._note_all(frame.f_locals)
                if id(frame.f_globals) not in modules:
                    modules.add(id(frame.f_globals))
                    self._note_all(frame.f_globals)
            frame = frame.f_back

    def evaluations(self, training: DataLoader[Any]) -> tuple[Evaluation, ...]:
        """Return the loaders that evaluate what `training` trains."""
        return tuple(
            Evaluation(name=self._names.get(key) or type(loader.dataset).__name__, loader=loader)
            for key, loader in self._loaders.items()
            if loader is not training and self._evaluates(loader, training)
        )

    def _evaluates(self, loader: DataLoader[Any], training: DataLoader[Any]) -> bool:
        words = _words(self._names.get(id(loader), ""))
        if loader in self._with_gradients or words & _TRAINS:
            return False
        if loader in self._without or words & _EVALUATES:
            return True
        return isinstance(loader.sampler, SequentialSampler) and isinstance(training.sampler, RandomSampler)

    def _note_all(self, variables: Mapping[str, Any]) -> None:
        for name, loader in _find(dict(variables), _DEPTH):
            self._loaders.setdefault(id(loader), loader)
            self._names.setdefault(id(loader), name)


def _words(name: str) -> frozenset[str]:
    """Return the words of the last name in a path of them.

    >>> sorted(_words("trainer.valLoader")), sorted(_words("loaders['dev_set']")), sorted(_words("testloaders[0]"))
    (['loader', 'val'], ['dev', 'set'], ['loaders', 'test'])
    """
    last = re.findall(r"[A-Za-z_]+", name)[-1:]
    spaced = re.sub(r"([a-z])([A-Z])", r"\1_\2", "".join(last)).lower()
    parted = re.sub(r"(loaders?|set|data|dl|ds)(_|$)", r"_\1\2", spaced)
    return frozenset(word for word in parted.split("_") if word)


def _find(
    values: Mapping[Any, Any], depth: int, before: str = "", after: str = ""
) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield the loaders in variables, with names, and those in their containers and in the objects that they are."""
    for key, value in list(values.items())[:_MOST_VALUES]:
        name = f"{before}{key}{after}"
        if issubclass(type(value), DataLoader):
            yield name, value
        elif depth > 1 and type(value) is dict:
            yield from _find({repr(inner): one for inner, one in value.items()}, depth - 1, f"{name}[", "]")
        elif depth > 1 and type(value) in (list, tuple):
            yield from _find(dict(enumerate(value[:_MOST_VALUES])), depth - 1, f"{name}[", "]")
        elif depth > 1 and _is_users(value):
            yield from _find(attributes_of(value), depth - 1, f"{name}.")


def _is_users(value: Any) -> bool:
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    return has_attributes(value) and not isinstance(value, type) and bool(file) and is_users(str(file))
