"""TFRecord files of tf.train.Example or SequenceExample records."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load() -> Implementation:
    from penstock.data.formats.tfrecord import features, source

    return Implementation(
        open_files=source.open_files,
        writer=source.TFRecordWriter,
        why_unsupported=features.why_unsupported,
    )


TFRECORD = Format(name="tfrecord", suffixes=(".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz"), load=_load)
