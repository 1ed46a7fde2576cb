"""Causes for what has no name in the other tables: one line, or the collate function, takes most of the time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from penstock.core.units import size_text
from penstock.observe.doctor.causes import sample_lines, samples, worker_count
from penstock.observe.doctor.causes.bottleneck import MEANING, RANDOM_REMEDY, REMEDY
from penstock.observe.doctor.causes.cause import Cause, ask, cause, required
from penstock.observe.doctor.causes.evidence import (
    OF_SAMPLES,
    describe_line,
    gain_without,
    loading_matters,
    loading_parts_s,
    shrink_first,
)
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.probe_results import HotLine, Hotspot, SampleCosts
from penstock.observe.doctor.thresholds import THRESHOLDS
from penstock.observe.record.finding import Finding

_BETTER_KNOWN: tuple[Cause, ...] = (
    *sample_lines.LINE_PATTERNS,
    sample_lines.read_again_for_each_sample,
    sample_lines.same_for_every_sample,
    sample_lines.reads_more_than_it_keeps,
    sample_lines.threads_hold_each_other,
    samples.full_size_decode,
    samples.slow_samples,
    samples.cold_reads,
    worker_count.one_lock,
    worker_count.workers_do_not_scale,
    worker_count.waiting_samples,
)
"""Causes that say what a costly line is, or why it is none."""


@cause("costly-line", "samples")
def costly_line(measured: Measurements) -> Finding | None:
    """A few lines of the dataset, or one function of the program's own, take most of a sample's time."""
    return _costly_line(measured)


@cause("costly-line", "samples")
def line_beyond_its_result(measured: Measurements) -> Finding | None:
    """One line takes far longer than what it handles and gives would need: workers only share that out."""
    made = required(measured.samples)
    numbers = max(1, made.values_per_sample, *(line.values for line in made.lines[:1]))
    if not made.lines or made.lines[0].fraction * made.median_s < THRESHOLDS.costly_number_s * numbers:
        return None
    parts = loading_parts_s(measured)
    if max(OF_SAMPLES, key=lambda part: parts.get(part, 0.0)) not in ("dataset", "transform"):
        return None
    found = _costly_line(measured, is_beyond=True)
    if found is None or made.lines[0].fraction < THRESHOLDS.costly_line_fraction:
        return None
    spent_s = made.lines[0].fraction * made.median_s
    per_number = f"{spent_s * 1e3:.1f} ms of each sample, which has {made.values_per_sample} numbers"
    return replace(found, evidence=f"{found.evidence}; {per_number}")


def _costly_line(measured: Measurements, *, is_beyond: bool = False) -> Finding | None:
    made, parts = required(measured.samples), loading_parts_s(measured)
    lines, spot = made.lines, next(_own_functions(made), None)
    if not lines or made.median_s < THRESHOLDS.costly_sample_s:
        return None
    is_one = lines[0].fraction >= THRESHOLDS.costly_line_fraction
    is_function = not is_one and spot is not None and spot.fraction >= THRESHOLDS.costly_line_fraction
    if not is_function and sum(line.fraction for line in lines) < THRESHOLDS.costly_line_fraction:
        return None
    of_samples_s = sum(parts.get(part, 0.0) for part in OF_SAMPLES)
    if of_samples_s < THRESHOLDS.costly_line_fraction * sum(parts.values()) or not loading_matters(measured):
        return None
    known = [ask(one, measured) for one in _BETTER_KNOWN]
    if any(finding is not None and not finding.is_uncertain for finding in known):
        return None
    part = max(OF_SAMPLES, key=lambda one: parts.get(one, 0.0))
    is_random = _is_random(lines[:1] if is_one else lines)
    if not (is_one or is_function):  # a function that is called does not say what it is given
        is_random |= measured.worker_noise is not None
    if not is_beyond and is_random and _is_of_libraries(made) and not shrink_first(measured):
        return Finding(
            name="costly-line",
            cause=f"What is random is made anew for each sample, and takes long: {MEANING[part]}.",
            evidence=f"{_describe_lines(lines, made, is_one=is_one)}; it is libraries' work with random numbers",
            remedy=RANDOM_REMEDY,
            is_uncertain=True,
        )
    what, place = ("One line takes", describe_line(lines[0])) if is_one else ("A few lines take", "these lines")
    if is_function and spot is not None:
        what, place = "One function takes", spot.where
    return Finding(
        name="costly-line",
        cause=f"{what} most of the time of every sample: {MEANING[part]}.",
        evidence=_describe_lines(lines, made, is_one=is_one),
        remedy=f"{place}: {'; or '.join(filter(None, (shrink_first(measured), REMEDY[part])))}",
    )


def _describe_lines(lines: tuple[HotLine, ...], made: SampleCosts, *, is_one: bool) -> str:
    shown = "this line" if is_one else "; ".join(f"{describe_line(line)} ({line.fraction:.0%})" for line in lines)
    total = lines[0].fraction if is_one else sum(line.fraction for line in lines)
    functions = ", ".join(f"{one.where} {one.fraction:.0%}" for one in _own_functions(made))
    inside = f"; by functions: {functions}" if functions and (not lines[0].calls or not is_one) else ""
    return f"{total:.0%} of a sample's time passes in {shown}{inside}"


def _own_functions(made: SampleCosts) -> Iterator[Hotspot]:
    """Yield the program's own functions that take a good part of a sample's time by themselves."""
    return (spot for spot in made.hotspots if not spot.caller and ".py:" in spot.where)


def _is_random(lines: tuple[HotLine, ...]) -> bool:
    """Return whether most of what these lines take is for what is random, and cannot be made before."""
    random = sum(line.fraction for line in lines if line.is_random)
    return random >= THRESHOLDS.costly_line_fraction * sum(line.fraction for line in lines)


def _is_of_libraries(made: SampleCosts) -> bool:
    """Return whether the program's own functions take little of a sample's time by themselves."""
    return sum(spot.fraction for spot in _own_functions(made)) < THRESHOLDS.line_fraction


@cause("costly-sampler", "samples")
def costly_sampler(measured: Measurements) -> Finding | None:
    """The sampler takes most of the time to make a batch."""
    made, parts = required(measured.samples), loading_parts_s(measured)
    if parts.get("sampler", 0.0) < THRESHOLDS.line_fraction * sum(parts.values()) or not loading_matters(measured):
        return None
    return Finding(
        name="costly-sampler",
        cause="The sampler takes most of the time to make a batch, and the step waits: no worker does it.",
        evidence=(
            f"drawing the indices of a batch takes {made.sampler_s * 1e3:.1f} ms, making its samples "
            f"{made.batch_s * 1e3:.1f} ms{_longest_called(measured)}"
        ),
        remedy=REMEDY["sampler"],
        gain=gain_without(1.0, measured, ("sampler",)),
    )


def _longest_called(measured: Measurements) -> str:
    lines = measured.called_lines[:1]
    return "".join(f"; outside of the dataset, most time passes in {describe_line(line)}" for line in lines)


@cause("costly-sampler-start", "samples", "as_is")
def costly_sampler_start(measured: Measurements) -> Finding | None:
    """The sampler works before it gives the first index, as one that makes all samples to sort them by length."""
    start_s, own = required(measured.samples).sampler_start_s, measured.settings
    epoch_s = start_s + (own.length or math.inf) * (required(measured.as_is).batch_s or math.inf)
    if start_s < max(THRESHOLDS.sampler_start_s, THRESHOLDS.startup_fraction * epoch_s):
        return None
    return Finding(
        name="costly-sampler-start",
        cause="The sampler works for a good part of every epoch before it gives the first index, and the loop waits.",
        evidence=f"its start takes {start_s * 1e3:.0f} ms, an epoch of {own.length} batches {epoch_s * 1e3:.0f} ms",
        remedy=(
            "compute what it needs of the dataset once, in its __init__ (lengths, weights, groups; kept in a file if "
            "it takes long), and only shuffle in __iter__"
        ),
        gain=epoch_s / (epoch_s - start_s),
    )


@cause("costly-sampler-start", "samples", "as_is")
def sampler_start_beyond_samples(measured: Measurements) -> Finding | None:
    """The same, where it is so much of an epoch that nothing of a single sample can be worth more."""
    found = costly_sampler_start.find(measured)
    return found if found is not None and (found.gain or 0.0) >= THRESHOLDS.certain_startup_gain else None


@cause("unused-fields", "samples", "step_calls")
def unused_fields(measured: Measurements) -> Finding | None:
    """Much of every batch is tensors that the step never touches."""
    unused, samples = required(measured.step_calls).unused_fields, required(measured.samples)
    nbytes, batch_nbytes = sum(one.nbytes for one in unused), max(1, samples.batch_nbytes)
    if nbytes < max(THRESHOLDS.unused_nbytes, THRESHOLDS.unused_fraction * batch_nbytes):
        return None
    parts = loading_parts_s(measured)
    moved_s = sum(parts.get(part, 0.0) for part in ("collate", "transport"))
    if not loading_matters(measured) or moved_s < THRESHOLDS.costly_line_fraction * sum(parts.values()):
        return None
    return Finding(
        name="unused-fields",
        cause="Every batch carries tensors that the step never touches: they are made, collated and sent for nothing.",
        evidence=(
            f"{size_text(nbytes)} of the {size_text(batch_nbytes)} of a batch were used by none of the observed steps: "
            f"{'; '.join(one.what for one in unused[:3])}; collating and transporting takes {moved_s * 1e3:.1f} ms of "
            "each batch"
        ),
        remedy="return from __getitem__ what the step uses, and no more: the rest where it is needed, by its index",
    )


@cause("costly-collate", "samples")
def costly_collate(measured: Measurements) -> Finding | None:
    """The program's own collate function takes most of the time to make a batch."""
    made, parts = required(measured.samples), loading_parts_s(measured)
    if measured.settings.collates_by_default or not loading_matters(measured):
        return None
    fraction = made.collate_s / max(1e-9, made.batch_s)
    if fraction < THRESHOLDS.costly_line_fraction or parts["collate"] < max(parts.values()):
        return None
    return Finding(
        name="costly-collate",
        cause="The program's own collate_fn takes most of the time to make a batch.",
        evidence=(
            f"collating takes {made.collate_s * 1e3:.1f} ms per batch, {fraction:.0%} of the time to make it"
            + _longest_called(measured) * (not measured.settings.num_workers)
        ),
        remedy=(
            "in collate_fn, handle whole arrays and no single numbers: torch.stack(tensors), "
            "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.from_numpy(numpy.stack(arrays)); what "
            "concerns one sample belongs into __getitem__"
        ),
        gain=gain_without(fraction, measured, (*OF_SAMPLES, "collate")),
    )
