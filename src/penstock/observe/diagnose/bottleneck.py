"""The one bottleneck of a loop, with its evidence; or that there is none."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.observe.diagnose.reading import loading_matters, parts_s, slowed, stall_share, takes_cores
from penstock.observe.examination import Examination
from penstock.observe.finding import Finding
from penstock.observe.trial import FREE

HEALTHY = "healthy"
_SLOWED = 1.3
_QUICK_S = 0.004

_MEANING = {
    "dataset": "making samples",
    "storage": "reading samples, and waiting for what is read,",
    "decode": "decoding samples",
    "transform": "transforming samples",
    "collate": "putting samples together to batches",
    "transport": "putting batches into shared memory and handing them to the loop",
    "start-up": "starting workers for every epoch",
}
_REMEDY = {
    "dataset": "make samples cheaper, or num_workers higher",
    "storage": "read ahead with more workers (num_workers=), read larger pieces, or keep the data nearer",
    "decode": "open files once and decode less (smaller files, a reduced decode), use a faster decoder, or "
    "raise num_workers",
    "transform": "do it once for whole batches (NumPy, torch), do it before training, or raise num_workers",
    "collate": "return arrays or tensors of one shape from __getitem__, so that the default collate_fn can stack them",
    "transport": "from penstock import DataLoader",
    "start-up": "persistent_workers=True",
}


def bottleneck(found: Examination, *, is_quiet: bool = True) -> Finding:
    """Return the verdict on a loop; `is_quiet` where nothing was found that should be changed."""
    if found.error or found.hang is not None or found.as_it_is is None:
        return _unknown(found)
    if found.has_step and not loading_matters(found):
        return _contention(found) or _healthy(found)
    parts = parts_s(found)
    if not parts:
        return _unknown(found)
    if not found.has_step and is_quiet and sum(parts.values()) < _QUICK_S:
        return _quick(found)
    return _bound(found)


def _unknown(found: Examination) -> Finding:
    if found.error:
        return Finding(name="fails", cause="The loop failed.", evidence=found.error, remedy="")
    if found.hang is not None:
        return Finding(
            name="workers-hang",
            cause="The loop waits for its workers, and they for ever.",
            evidence=f"it had waited for {found.hang.waited_s:.0f} s when it was ended",
            remedy="",
        )
    return Finding(
        name="unknown",
        cause="It could not be told where the time goes.",
        evidence="; ".join(found.notes) or "no batch was timed",
        remedy="give it more time: --seconds 60",
    )


def _healthy(found: Examination) -> Finding:
    now, free = found.as_it_is, found.gain_of(FREE)
    assert now is not None
    said = ""
    if free is not None:
        said = f"; with loading free it is {free.median:.2f} times as fast ({free.low:.2f} … {free.high:.2f})"
    return Finding(
        name=HEALTHY,
        cause="The loop is bound by its own step: loading is hidden behind it.",
        evidence=f"it waits for data {stall_share(found):.1%} of its time{said}",
        remedy="",
        gain=free.median if free is not None else None,
        is_measured=free is not None,
    )


def _contention(found: Examination) -> Finding | None:
    times = slowed(found)
    if times is None or times < _SLOWED or not takes_cores(found):
        return None
    free = found.gain_of(FREE)
    return Finding(
        name="cpu-contention",
        cause="The step and the workers take processors from each other.",
        evidence=f"beside its loader the step takes {times:.1f} times as long as with loading free",
        remedy="",
        gain=free.median if free is not None else None,
        is_measured=free is not None,
    )


def _quick(found: Examination) -> Finding:
    now = found.as_it_is
    assert now is not None
    return Finding(
        name=HEALTHY,
        cause="The loader is quick; whether any step waits for it depends on the step, which was not given.",
        evidence=f"a batch every {(now.batch_s or 0.0) * 1e3:.2f} ms",
        remedy="",
    )


def _bound(found: Examination) -> Finding:
    parts = _told_apart(found)
    largest = max(parts, key=lambda part: parts[part])
    whole_s = sum(parts.values())
    free = found.gain_of(FREE)
    now = found.as_it_is
    assert now is not None
    waits = f"the loop waits for data {now.waited_share:.0%} of its time" if found.has_step else "the loader alone"
    if found.has_step and free is not None:
        waits += f", and is {free.median:.1f} times as fast with loading free"
    return Finding(
        name=f"{largest}-bound",
        cause=f"Most of the loading goes into {_MEANING[largest]}.".replace(",.", "."),
        evidence=(
            f"{waits}; of {whole_s * 1e3:.1f} ms of loading per batch, {_MEANING[largest]} "
            f"takes {parts[largest] * 1e3:.1f} ms ({parts[largest] / whole_s:.0%}){_hottest(found, largest)}"
        ),
        remedy="",
        gain=free.median if found.has_step and free is not None else None,
        is_measured=found.has_step and free is not None,
    )


def _told_apart(found: Examination) -> Mapping[str, float]:
    """Return the parts, with the default collate's copy counted as transport where workers hand it over.

    It writes tensors into the segment that the batch travels in, and most of both is the segment's fresh pages.
    """
    parts = dict(parts_s(found))
    samples = found.samples
    copies = found.settings.collates_by_default and samples is not None and samples.numbers_per_sample < 32
    if copies and parts.get("transport"):
        parts["transport"] += parts.pop("collate")
    return parts


def remedy_for(verdict: Finding, found: Examination) -> str:
    """Return what can be done about a bottleneck in general, where no cause is known that says it better."""
    part = verdict.name.removesuffix("-bound")
    samples = found.samples
    if part in ("storage", "decode", "transform") and samples is not None and samples.hotspots:
        hottest = samples.hotspots[0]
        return f"{hottest.caller or hottest.where}: {_REMEDY[part]}"
    return _REMEDY.get(part, "")


def _hottest(found: Examination, part: str) -> str:
    samples = found.samples
    if part in ("collate", "transport", "start-up") or samples is None or not samples.hotspots:
        return ""
    hottest = samples.hotspots[0]
    under = f", under {hottest.caller}," if hottest.caller else " alone"
    return f"; {hottest.where}{under} is {hottest.share:.0%} of the dataset's time"
