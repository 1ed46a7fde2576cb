"""The doctor's report as text and as JSON: data in, text out. The verdict comes first."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from penstock.core.units import size_text
from penstock.observe.doctor.causes import Diagnosis
from penstock.observe.doctor.causes.bottleneck import MEANING
from penstock.observe.doctor.causes.evidence import describe_line, loading_parts_s, stall_fraction
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.doctor.trial import AS_IS, FREE, MORE_WORKERS, PENSTOCK, Trial
from penstock.observe.record.finding import Finding

_WIDTH = 110
_QUESTIONS = {
    FREE: "What if loading were free?",
    MORE_WORKERS: "What if there were 2 more workers?",
    PENSTOCK: "What if it were penstock's loader?",
}
_HEADLINES = {
    "healthy": "HEALTHY",
    "fails": "the loop fails",
    "unknown": "the bottleneck is unknown",
}
_SCHEMA = "penstock.doctor/1"


def as_json(measured: Measurements, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return all measurements and all findings, with the schema's name."""
    return {
        "schema": _SCHEMA,
        "verdict": asdict(diagnosis.verdict),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "parts_s": dict(loading_parts_s(measured)),
        "stall_fraction": stall_fraction(measured),
        "trials": [_trial_json(measured, trial) for trial in measured.trials if trial.name != AS_IS],
        "measurements": asdict(measured),
    }


def render(measured: Measurements, diagnosis: Diagnosis) -> str:
    """Return the report as lines of plain text."""
    lines = [
        f"{measured.name}: {_headline(diagnosis)}",
        *_paragraph(f"{diagnosis.verdict.cause} {_sentence(diagnosis.verdict.evidence)}", "  "),
    ]
    lines += _remedies(diagnosis)
    lines += ["", *_cost_table(measured)]
    lines += ["", *_trial_lines(measured)] if len(measured.trials) > 1 else []
    lines += ["", *_facts(measured)]
    if measured.notes:
        lines += ["", "Not measured", *(line for note in measured.notes for line in _paragraph(note, "  "))]
    return "\n".join(lines) + "\n"


def _headline(diagnosis: Diagnosis) -> str:
    name, findings = diagnosis.verdict.name, diagnosis.findings
    if name == "healthy" and findings and findings[0].is_for_accelerators:
        return f"HEALTHY on this machine; on one with an accelerator: {findings[0].name}"
    return _HEADLINES.get(name) or f"the bottleneck is {name}"


def _remedies(diagnosis: Diagnosis) -> list[str]:
    remedy = diagnosis.verdict.remedy
    general = ["", *_paragraph(f"→ {remedy}", "  ", "    ")] if remedy else []
    if not diagnosis.findings:
        return general
    lines = general if diagnosis.verdict.remedy != diagnosis.findings[0].remedy else []
    heading = ""
    for number, finding in enumerate(diagnosis.findings, 1):
        if _heading(finding) != heading:
            heading = _heading(finding)
            lines += ["", heading]
        lines += _paragraph(f"{number}. {finding.name}: {finding.cause}{_gain(finding)}", "  ", "     ")
        lines += _paragraph(finding.evidence, "     ")
        lines += _paragraph(f"→ {finding.remedy}", "     ", "       ")
    return lines


def _heading(finding: Finding) -> str:
    if finding.is_for_accelerators:
        return "On a machine with an accelerator (it costs nothing here)"
    return "Perhaps (the measurements do not tell)" if finding.is_uncertain else "To change"


def _gain(finding: Finding) -> str:
    if finding.gain is None:
        return ""
    return f" [{finding.gain:.1f} times as fast, {'measured' if finding.is_measured else 'an estimate'}]"


def _cost_table(measured: Measurements) -> list[str]:
    own, now, free = measured.settings, measured.as_is, measured.trial(FREE)
    parts = loading_parts_s(measured)
    samples = measured.samples
    size = f" ({samples.batch_samples} samples, {size_text(samples.batch_nbytes)})" if samples is not None else ""
    lines = [f"Cost of a batch{size}"]
    where = f", divided by {own.num_workers} workers" if own.num_workers else ", in the training process"
    for part, seconds in parts.items():
        is_shared = part not in ("sampler", "transport", "start-up")
        lines.append(_row(part, seconds, MEANING[part] + where * is_shared))
    if measured.transfer_s is not None:
        memory = "pinned" if own.pin_memory else "pageable"
        where = f"from {memory} memory to {measured.machine.accelerator}, which the step does"
        lines.append(_row("transfer", measured.transfer_s, where))
    if free is not None and free.batch_s is not None:
        alone_s = min(free.batch_s, now.batch_s or free.batch_s) if now is not None else free.batch_s
        lines.append(_row("step", alone_s, "alone, with the same batch every time"))
    elif now is not None and measured.has_step:
        lines.append(_row("step", now.step_s or 0.0, ""))
    if now is not None and now.batch_s is not None:
        waits = f"; the loop waits {now.wait_fraction:.0%} of it" if measured.has_step else ""
        lines.append(_row("total", now.batch_s, f"as is{waits}"))
    return lines


def _row(name: str, seconds: float, meaning: str) -> str:
    return f"  {name:<12}{seconds * 1e3:>10.2f} ms  {meaning}".rstrip()


def _trial_lines(measured: Measurements) -> list[str]:
    lines = ["What if (each tried in this loop, interleaved with the loop as is)"]
    for trial in measured.trials:
        if trial.name != AS_IS:
            lines += _paragraph(f"{_question(trial)} {_answer(measured, trial)}", "  ", "    ")
    return lines


def _question(trial: Trial) -> str:
    return _QUESTIONS.get(trial.name, f"What if {trial.line}?" if trial.line else f"What if {trial.name}?")


def _answer(measured: Measurements, trial: Trial) -> str:
    gain = measured.gain_of(trial.name)
    if gain is None:
        return f"not tried: {trial.failure or 'the time was over'}"
    if gain.rounds == 1:
        return "not known: there was time for one round only"
    rounds = f"{gain.low:.2f} … {gain.high:.2f} times as fast in {gain.rounds} rounds"
    if not gain.is_clear:
        return f"not known: rounds do not agree ({rounds})"
    line = f"; {trial.line}" if trial.line and gain.pays() else ""
    return f"{gain.median:.2f} times as fast (measured, {rounds}){line}"


def _facts(measured: Measurements) -> list[str]:
    own, machine, samples = measured.settings, measured.machine, measured.samples
    workers = f"{own.num_workers} worker{'s' * (own.num_workers != 1)}" + (
        f" ({own.start_method})" if own.start_method else ""
    )
    quota = f", quota {machine.quota_cores:g}" if machine.quota_cores else ""
    after = f", after {measured.preparing_s:.0f} s of the program's own" if measured.preparing_s >= 1.0 else ""
    loader = (
        f"{own.kind}'s DataLoader of {own.dataset}, {workers}, batch_size={own.batch_size}, "
        f"prefetch_factor={own.prefetch_factor}, pin_memory={own.pin_memory}"
    )
    lines = [
        f"  {loader}",
        f"  {machine.cores} cores{quota}, torch.get_num_threads() is {machine.intra_op_threads}, accelerator: "
        f"{machine.accelerator or 'none'}; measured for {measured.wall_s - measured.preparing_s:.0f} s{after}",
    ]
    if machine.is_busy:
        cores = f"{machine.others_cores:.1f}" if machine.others_cores is not None else "perhaps all"
        lines.append(
            f"  other programs keep this machine busy ({cores} of {machine.cores} cores during the "
            f"measurements, a load of {machine.load:.1f} before them): here is where the time goes, with one thread of "
            "torch's, and no gain is stated, as what another number of workers gains it takes from them"
        )
    lines += _same_samples(measured)
    if samples is not None and samples.lines:
        lines += [f"  {line.fraction:.0%} of a sample's time: {describe_line(line)}" for line in samples.lines]
    lines += [f"  {line.fraction:.0%} of the step's time: {describe_line(line)}" for line in measured.step_lines]
    return ["Facts", *(line for fact in lines for line in _paragraph(fact.strip(), "  ", "    "))]


def _same_samples(measured: Measurements) -> list[str]:
    """Return what many programs do on purpose, and what explains a result that is better than expected."""
    lines = [
        f"{one.loader} evaluates the samples that the loop trains on, all {one.compared} that were compared and no "
        "others: its result says nothing about new data"
        for one in measured.shared_samples
        if one.extent == "same"
    ]
    if measured.listed_twice:
        lines.append(
            f"the training loader has {measured.listed_twice} samples more than once (oversampling): copies must not "
            "be split into different sets"
        )
    return lines


def _trial_json(measured: Measurements, trial: Trial) -> dict[str, Any]:
    gain = measured.gain_of(trial.name)
    factors = asdict(gain) | {"is_clear": gain.is_clear} if gain is not None else None
    return {"name": trial.name, "line": trial.line, "gain": factors, "answer": _answer(measured, trial)}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _paragraph(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest or first,
        break_long_words=False,
        break_on_hyphens=False,
    )
