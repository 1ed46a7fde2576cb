"""An examination as text and as JSON: data in, text out. The verdict comes first."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from penstock.core.units import size_text
from penstock.observe.diagnose import Diagnosis
from penstock.observe.diagnose.reading import parts_s, stall_share
from penstock.observe.examination import Examination
from penstock.observe.finding import Finding
from penstock.observe.trial import AS_IT_IS, FREE, MORE_WORKERS, PENSTOCK, PINNED, PROCESSES, THREADS, Trial

_WIDTH = 110
_QUESTIONS = {
    FREE: "What if loading were free?",
    MORE_WORKERS: "What if there were 2 more workers?",
    THREADS: "What if workers were threads?",
    PROCESSES: "What if workers were processes?",
    PENSTOCK: "What if it were penstock's loader?",
    PINNED: "What if batches were pinned?",
}
_SAID = {
    "healthy": "HEALTHY",
    "fails": "the loop fails",
    "workers-hang": "the workers hang",
    "unknown": "it cannot be told",
}
_SCHEMA = "penstock.doctor/1"


def as_json(found: Examination, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything that was measured and found, with the schema's name."""
    return {
        "schema": _SCHEMA,
        "verdict": asdict(diagnosis.verdict),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "parts_s": dict(parts_s(found)),
        "stall_share": stall_share(found),
        "what_if": [_trial_json(found, trial) for trial in found.trials if trial.name != AS_IT_IS],
        "examination": asdict(found),
    }


def render(found: Examination, diagnosis: Diagnosis) -> str:
    """Return the examination as some lines of plain text."""
    lines = [
        f"{found.name}: {_headline(diagnosis.verdict)}",
        *_paragraph(f"{diagnosis.verdict.cause} {_sentence(diagnosis.verdict.evidence)}", "  "),
    ]
    lines += _remedies(diagnosis)
    lines += ["", *_table(found), "", *_what_ifs(found)]
    lines += ["", *_facts(found)]
    if found.notes:
        lines += ["", "Not measured", *(line for note in found.notes for line in _paragraph(note, "  "))]
    return "\n".join(lines) + "\n"


def _headline(verdict: Finding) -> str:
    return _SAID.get(verdict.name) or f"the bottleneck is {verdict.name}"


def _remedies(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.findings:
        remedy = diagnosis.verdict.remedy
        return ["", *_paragraph(f"→ {remedy}", "  ", "    ")] if remedy else []
    lines = ["", "To change"]
    for number, finding in enumerate(diagnosis.findings, 1):
        lines += _paragraph(f"{number}. {finding.name}: {finding.cause}{_gain(finding)}", "  ", "     ")
        lines += _paragraph(finding.evidence, "     ")
        lines += _paragraph(f"→ {finding.remedy}", "     ", "       ")
    return lines


def _gain(finding: Finding) -> str:
    if finding.gain is None:
        return ""
    return f" [{finding.gain:.1f} times as fast, {'measured' if finding.is_measured else 'an estimate'}]"


def _table(found: Examination) -> list[str]:
    own, now, free = found.settings, found.as_it_is, found.trial(FREE)
    parts = parts_s(found)
    samples = found.samples
    size = f" ({samples.batch_samples} samples, {size_text(samples.batch_nbytes)})" if samples is not None else ""
    lines = [f"A batch costs{size}"]
    shared = f", shared by {own.num_workers} workers" if own.num_workers else ", in the training process"
    for part, seconds in parts.items():
        how = shared if part not in ("transport", "start-up") else ""
        lines.append(_row(part, seconds, _PARTS[part] + how))
    if found.transfer_s is not None:
        lines.append(_row("transfer", found.transfer_s, f"from pageable memory to {found.machine.accelerator}"))
    if free is not None and free.batch_s is not None:
        lines.append(_row("step", free.batch_s, "alone, the same batch again and again"))
    elif now is not None and found.has_step:
        lines.append(
            _row("step", sum(one.step_s for one in now.stretches) / sum(one.batches for one in now.stretches), "")
        )
    if now is not None and now.batch_s is not None:
        waits = f"; the loop waits {now.waited_share:.0%} of it" if found.has_step else ""
        lines.append(_row("in all", now.batch_s, f"as it is{waits}"))
    return lines


_PARTS = {
    "dataset": "making samples (no telling apart: another profiler is at work)",
    "storage": "reading, and waiting for what is read",
    "decode": "decoding, unpacking",
    "transform": "transforms, and the rest of the dataset's own code",
    "collate": "samples into a batch",
    "transport": "from the workers to the loop",
    "start-up": "of workers, per batch of an epoch",
}


def _row(name: str, seconds: float, meaning: str) -> str:
    return f"  {name:<12}{seconds * 1e3:>10.2f} ms  {meaning}".rstrip()


def _what_ifs(found: Examination) -> list[str]:
    lines = ["What if (each tried in this very loop, by turns with the loop as it is)"]
    for trial in found.trials:
        if trial.name != AS_IT_IS:
            lines += _paragraph(f"{_question(trial)} {_answer(found, trial)}", "  ", "    ")
    if found.trial(PINNED) is None:
        lines += _paragraph(f"{_QUESTIONS[PINNED]} {_pinned(found)}", "  ", "    ")
    return lines


def _question(trial: Trial) -> str:
    return _QUESTIONS.get(trial.name, f"What if {trial.line}?" if trial.line else f"What if {trial.name}?")


def _answer(found: Examination, trial: Trial) -> str:
    gain = found.gain_of(trial.name)
    if gain is None:
        return f"could not be tried: {trial.failure or 'the time was over'}"
    rounds = f"measured, {gain.low:.2f} … {gain.high:.2f} in {gain.rounds} rounds"
    line = f"; {trial.line}" if trial.line and gain.pays() else ""
    if not gain.is_clear:
        return f"cannot tell: {gain.median:.2f} times as fast, but rounds differ more than that ({rounds})"
    if gain.is_none:
        return f"no difference: {gain.median:.2f} times as fast ({rounds})"
    return f"{gain.median:.2f} times as fast ({rounds}){line}"


def _pinned(found: Examination) -> str:
    if found.settings.pin_memory:
        return "they are asked to be."
    if not found.machine.accelerator:
        return "cannot be told here: there is no accelerator."
    return "could not be tried."


def _facts(found: Examination) -> list[str]:
    own, machine, samples = found.settings, found.machine, found.samples
    how = f"{own.num_workers} workers" + (f" ({own.start_method})" if own.start_method else "")
    quota = f", quota {machine.quota_cores:g}" if machine.quota_cores else ""
    lines = [
        f"  {own.kind}'s DataLoader of {own.dataset}, {how}, batch_size={own.batch_size}, "
        f"prefetch_factor={own.prefetch_factor}, pin_memory={own.pin_memory}",
        f"  {machine.cores} cores{quota}, torch computes with {machine.intra_op_threads} threads, accelerator: "
        f"{machine.accelerator or 'none'}; examined for {found.wall_s:.0f} s",
    ]
    if machine.is_busy:
        lines.append(
            f"  other programs keep this machine busy (a load of {machine.load:.1f} on {machine.cores} cores when it "
            "began): workers and threads would gain more without them"
        )
    if found.threads is not None:
        lines.append(f"  threads: {_threads(found)}")
    if samples is not None and samples.hotspots:
        spots = ", ".join(f"{spot.where} {spot.share:.0%}" for spot in samples.hotspots)
        lines.append(f"  in the dataset, by themselves: {spots}")
    return ["Facts", *(line for fact in lines for line in _paragraph(fact.strip(), "  ", "    "))]


def _threads(found: Examination) -> str:
    look = found.threads
    assert look is not None
    if look.failure:
        return f"cannot be told, the dataset failed in one ({look.failure})"
    seen = (
        f"{look.threads} make samples {look.speedup:.2f} times as fast as one, and another thread's Python comes "
        f"{look.others_progress:.0%} as far meanwhile as alone"
    )
    if look.speedup >= 1.5:
        return f"they pay, the dataset lets go of Python's lock ({seen})"
    if look.speedup <= 1.2:
        return f"they do not pay, the dataset holds Python's lock or another ({seen})"
    return f"cannot be told ({seen})"


def _trial_json(found: Examination, trial: Trial) -> dict[str, Any]:
    gain = found.gain_of(trial.name)
    said = asdict(gain) | {"is_clear": gain.is_clear} if gain is not None else None
    return {"name": trial.name, "line": trial.line, "gain": said, "answer": _answer(found, trial)}


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
