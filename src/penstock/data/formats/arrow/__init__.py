"""Arrow IPC and Parquet: two formats in one folder, as both are tables of Arrow columns, read in groups of rows."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load_parquet() -> Implementation:
    from penstock.data.formats.arrow import parquet, writer

    return Implementation(
        open_files=parquet.ParquetSource,
        writer=parquet.ParquetWriter,
        why_unsupported=writer.why_unsupported,
    )


def _load_arrow() -> Implementation:
    from penstock.data.formats.arrow import ipc, writer

    return Implementation(
        open_files=ipc.ArrowSource,
        writer=ipc.ArrowWriter,
        why_unsupported=writer.why_unsupported,
    )


PARQUET = Format(name="parquet", suffixes=(".parquet",), load=_load_parquet)
ARROW = Format(name="arrow", suffixes=(".arrow", ".feather"), load=_load_arrow)
