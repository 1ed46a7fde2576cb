"""Writes a run's timeline as TensorBoard scalars. The one file that imports tensorboard
(`pip install "penstock[tensorboard]"`).

Tags begin with `penstock/`. A scalar's step is the number of batches handed out so far; its time is the wall
clock's.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError
from penstock.observe.record.run_record import RunRecord
from penstock.observe.record.time_series import build_time_series

Scalar = tuple[str, float, int, float]
"""Tag, seconds since the run's start, batches so far, value."""


def scalars(record: RunRecord) -> Iterator[Scalar]:
    """Yield the scalars of each tag in the order of time."""
    batches = {point.at_s: point.batches for point in record.timeline}
    for span in build_time_series(record.timeline).spans:
        position = span.to_s, batches.get(span.to_s, 0)
        yield "penstock/samples_per_s", *position, span.samples_per_s
        yield "penstock/fraction/step", *position, span.step
        yield "penstock/fraction/waiting", *position, span.waiting
        yield "penstock/workers/reading", *position, span.reading
        yield "penstock/workers/collating", *position, span.collating
        if span.device_utilization is not None:
            yield "penstock/device/utilization", *position, span.device_utilization
    for point in record.timeline:
        position = point.at_s, point.batches
        yield "penstock/batches/ready", *position, point.ready
        yield "penstock/batches/held", *position, point.held
        yield "penstock/memory_nbytes/slots", *position, point.slots_nbytes
        for tag, nbytes in (
            ("host", point.host_nbytes),
            ("device", point.device_nbytes),
            ("device_peak", point.device_peak_nbytes),
            ("device_reserved", point.device_reserved_nbytes),
        ):
            if nbytes is not None:
                yield f"penstock/memory_nbytes/{tag}", *position, nbytes


def write_scalars(record: RunRecord, folder: Path) -> None:
    """Write an event file into `folder`, which is created if it is missing.

    Raises:
        OptionError: tensorboard is not installed, or the folder cannot be written to.
    """
    event_pb2, summary_pb2, writer_type = _tensorboard()
    started_unix_s = record.started_unix_ns / 1e9 or datetime.datetime.fromisoformat(record.started).timestamp()
    try:
        writer = writer_type(str(folder))
    except OSError as exc:
        raise OptionError(f"{folder} cannot be written to ({exc}); give another --tensorboard DIR") from exc
    try:
        for tag, at_s, step, value in scalars(record):
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(event_pb2.Event(wall_time=started_unix_s + at_s, step=step, summary=summary))
    finally:
        writer.close()


def _tensorboard() -> tuple[Any, Any, Any]:
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as exc:
        raise OptionError(
            f'--tensorboard needs the package tensorboard ({exc}); install it: pip install "penstock[tensorboard]"'
        ) from exc
    return event_pb2, summary_pb2, EventFileWriter
