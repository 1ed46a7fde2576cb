"""Lines of the dataset that seed a generator of random numbers with the same number for every sample.

Python, NumPy and torch do not tell what seeded a generator. So for a few samples their seeding functions are replaced
by ones that note their argument, in the libraries and under whatever name the user's modules imported them. Generators
that a sample makes as objects (`random.Random(0)`, `torch.Generator()`) are not seen.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch

from penstock.core.user_code import is_users, line_text
from penstock.observe.doctor.probe_results import ConstantSeed
from penstock.observe.doctor.probes.line_sampler import find_line

_SEEDING = ((torch, "manual_seed"), (np.random, "seed"), (np.random, "default_rng"), (random, "seed"))
_MOST_SAMPLES = 16
_LEAST_SAMPLES = 4


class SeedRecorder:
    """Notes with what number each line of the user's seeds a generator, sample by sample."""

    def __init__(self) -> None:
        self._indices: set[str] = set()
        self._seen: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._index = ""
        self._places = _find_places({id(one := getattr(*place)): self._wrapped(one) for place in _SEEDING})
        """Module, name, what it has there, and what replaces it: found once, because that takes milliseconds."""

    @contextmanager
    def sample(self, index: object) -> Iterator[None]:
        """Note what is seeded inside of the `with` block, which makes the sample `index`; of the first few."""
        if len(self._indices) >= _MOST_SAMPLES:
            yield
            return
        self._index = str(index)
        self._indices.add(self._index)
        for module, name, _, new in self._places:
            setattr(module, name, new)
        try:
            yield
        finally:
            for module, name, original, _ in self._places:
                setattr(module, name, original)

    def result(self) -> ConstantSeed | None:
        """Return the first line that gave the same number for every sample; None without one."""
        if len(self._indices) < _LEAST_SAMPLES:
            return None
        for (file, number, _), seeds in self._seen.items():
            values = set(seeds.values())
            if len(seeds) == len(self._indices) and len(values) == 1:
                return ConstantSeed(line=line_text(file, number), seed=values.pop(), samples=len(seeds))
        return None

    def _note(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seed = next(iter((*arguments, *options.values())), None)
        line = find_line(sys._getframe(2))
        if isinstance(seed, int) and line is not None:
            self._seen.setdefault(line, {}).setdefault(self._index, seed)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def seeding(*arguments: Any, **options: Any) -> Any:
            self._note(arguments, options)
            return original(*arguments, **options)

        return seeding


def _find_places(replacements: Mapping[int, Any]) -> list[tuple[ModuleType, str, Any, Any]]:
    """Return where the libraries and the user's modules have the objects with these identities."""
    files = [(module, getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    users = [module for module, file in files if file and is_users(file)]
    return [
        (module, name, value, replacements[id(value)])
        for module in {owner for owner, _ in _SEEDING}.union(users)
        for name, value in list(vars(module).items())
        if id(value) in replacements
    ]
