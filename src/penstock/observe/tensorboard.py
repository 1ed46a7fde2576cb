"""A run's course as TensorBoard scalars. The one file that imports tensorboard (`pip install "penstock[tensorboard]"`).

Tags begin with `penstock/`. A scalar's step is the number of batches handed out by then, its time that of the wall
clock.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.core.errors import OptionError
from penstock.observe.course import course_of
from penstock.observe.record import RunRecord

Scalar = tuple[str, float, int, float]
"""Tag, seconds since the run's start, batches by then, value."""


def scalars(record: RunRecord) -> Iterator[Scalar]:
    """Yield what is written, tag by tag in the order of time."""
    batches = {moment.at_s: moment.batches for moment in record.timeline}
    for span in course_of(record.timeline).spans:
        where = span.to_s, batches.get(span.to_s, 0)
        yield "penstock/samples_per_s", *where, span.samples_per_s
        yield "penstock/share/step", *where, span.step
        yield "penstock/share/waiting", *where, span.waiting
        yield "penstock/share/transport", *where, span.transport
        yield "penstock/workers/reading", *where, span.reading
        yield "penstock/workers/collating", *where, span.collating
        if span.device_busy is not None:
            yield "penstock/device/busy", *where, span.device_busy
    for moment in record.timeline:
        where = moment.at_s, moment.batches
        yield "penstock/batches/ready", *where, moment.ready
        yield "penstock/batches/held", *where, moment.held
        yield "penstock/memory_nbytes/slots", *where, moment.slots_nbytes
        for tag, nbytes in (
            ("host", moment.host_nbytes),
            ("device", moment.device_nbytes),
            ("device_reserved", moment.device_reserved_nbytes),
        ):
            if nbytes is not None:
                yield f"penstock/memory_nbytes/{tag}", *where, nbytes


def write_scalars(record: RunRecord, folder: Path) -> None:
    """Write an event file into `folder`, which is made if it is not there.

    Raises:
        OptionError: tensorboard is not installed, or the folder cannot be written to.
    """
    event_pb2, summary_pb2, writer_type = _tensorboard()
    began_s = record.began_unix_ns / 1e9 or datetime.datetime.fromisoformat(record.started).timestamp()
    try:
        writer = writer_type(str(folder))
    except OSError as exc:
        raise OptionError(f"{folder} cannot be written to ({exc}); give another --tensorboard DIR") from exc
    try:
        for tag, at_s, step, value in scalars(record):
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(event_pb2.Event(wall_time=began_s + at_s, step=step, summary=summary))
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
