"""Causes that make a loop fail, hang or train on the wrong samples."""

from __future__ import annotations

from penstock.observe.doctor.causes.cause import cause, required
from penstock.observe.doctor.measurements import Measurements
from penstock.observe.record.finding import Finding


@cause("fails")
def fails(measured: Measurements) -> Finding | None:
    """The loop raised an exception."""
    if not measured.error:
        return None
    return Finding(
        name="fails",
        cause="The loop ended with an exception while it was measured.",
        evidence=measured.error,
        remedy="fix the exception first; the report below has what was measured before it",
    )


@cause("workers-hang", "hang")
def workers_hang(measured: Measurements) -> Finding | None:
    """Every worker is blocked on a lock, or on a thread that does not exist in it."""
    hang = required(measured.hang)
    is_forked = measured.settings.start_method == "fork"
    threaded = f", with {', '.join(hang.libraries)} loaded" if hang.libraries else ""
    why = (
        "; they were forked, and a forked worker has neither the threads of the training process nor the owner of a "
        "lock that one of them held (torch hangs in a worker that calls set_num_threads, if the training process has "
        "computed with several threads before)"
    )
    return Finding(
        name="workers-hang",
        cause="All workers are blocked on a lock or a thread, and the loop waits for them forever.",
        evidence=(
            f"no batch for {hang.waited_s:.0f} s, while all {hang.workers} workers used no processor and waited for a "
            f"lock{threaded}{why if is_forked else ''}"
        ),
        remedy=(
            'multiprocessing_context="forkserver"; or no torch.set_num_threads in workers, and no lock in the dataset '
            "that another thread may hold when workers are started"
            if is_forked
            else "find out where a worker is blocked: py-spy dump --pid PID"
        ),
    )


@cause("stream-not-sharded")
def stream_not_sharded(measured: Measurements) -> Finding | None:
    """Every worker of an IterableDataset returns the same samples."""
    if not measured.stream_repeats:
        return None
    return Finding(
        name="stream-not-sharded",
        cause="Every worker returns the same samples: the stream is not split between workers, so an epoch repeats it.",
        evidence=f"the first batches of the first two of {measured.settings.num_workers} workers were equal",
        remedy=(
            "split it in __iter__: info = torch.utils.data.get_worker_info(), then "
            "itertools.islice(samples, info.id, None, info.num_workers)"
        ),
    )
