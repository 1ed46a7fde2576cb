"""The result of one benchmark case: raw repeats, ratios, and which targets were reached. Data only, to and from JSON.

A ratio is penstock's figure divided by the other loader's figure of the same round, so that a machine that slows down
for a while slows both. The target (`at_least` or `at_most`) defines whether more or less is better.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

OURS = "penstock"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The bound that the median ratio of penstock to `against` must meet."""

    against: str
    at_least: float | None = None
    at_most: float | None = None

    def reached(self, ratio: float) -> bool:
        """Return whether `ratio` meets the bound."""
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeats in five numbers."""

    median: float
    lowest: float
    highest: float
    quartile1: float
    quartile3: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Summarise `values`, of which there must be one at least."""
        first, _, third = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return cls(
            median=statistics.median(values), lowest=min(values), highest=max(values), quartile1=first, quartile3=third
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """One thing measured, for penstock and others in the same rounds."""

    case: str
    """The benchmark case that it belongs to, as in `--cases`."""

    name: str
    """What was measured."""

    unit: str
    """The unit of the figures: samples/s, ms, MiB."""

    figures: dict[str, list[float]]
    """One figure per round, by loader. Empty for a mean of other results."""

    ratios: dict[str, list[float]]
    """Penstock's figure divided by the other loader's, round by round, by loader."""

    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know: loaders that failed during the run, constants that were calibrated."""

    def target(self, against: str) -> Target | None:
        """Return the target against `against`, if there is one."""
        return next((target for target in self.targets if target.against == against), None)

    def verdicts(self) -> list[bool]:
        """Return, for each target, whether it was reached."""
        return [target.reached(statistics.median(self.ratios[target.against])) for target in self.targets]

    def to_json(self) -> dict[str, Any]:
        """Return everything, with the spreads and the verdicts that follow from it."""
        spreads = {
            "figures": {name: asdict(Spread.of(values)) for name, values in self.figures.items()},
            "ratios": {name: asdict(Spread.of(values)) for name, values in self.ratios.items()},
        }
        return {**asdict(self), "spreads": spreads, "reached": self.verdicts()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Result:
        """Return the result of which `to_json` made `found`."""
        names = ("case", "name", "unit", "figures", "ratios", "notes")
        return cls(**{name: found[name] for name in names}, targets=[Target(**one) for one in found["targets"]])


def compare(
    case: str, name: str, unit: str, figures: dict[str, list[float]], targets: list[Target], notes: list[str]
) -> Result:
    """Return the result of `figures`, with penstock's ratio to each other loader in each round."""
    ratios = {
        other: [mine / theirs for mine, theirs in zip(figures[OURS], values, strict=True)]
        for other, values in figures.items()
        if other != OURS
    }
    return Result(case=case, name=name, unit=unit, figures=figures, ratios=ratios, targets=targets, notes=notes)


def geometric_mean(case: str, name: str, results: list[Result], targets: list[Target]) -> Result:
    """Return the geometric mean of the results' ratios, round by round, to every loader that is in all of them."""
    everywhere = [other for other in results[0].ratios if all(other in result.ratios for result in results)]
    ratios = {
        other: [prod(each) ** (1 / len(each)) for each in zip(*(r.ratios[other] for r in results), strict=True)]
        for other in everywhere
    }
    return Result(case=case, name=name, unit="", figures={}, ratios=ratios, targets=targets)
