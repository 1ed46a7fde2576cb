"""JSON and CSV: two formats in one folder, as both are text that may be packed."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load_jsonl() -> Implementation:
    from penstock.data.formats.text import jsonl

    return Implementation(
        open_files=jsonl.open_files,
        writer=jsonl.JsonLinesWriter,
        why_unsupported=jsonl.why_unsupported,
    )


def _load_csv() -> Implementation:
    from penstock.data.formats.text import csv

    return Implementation(
        open_files=csv.open_files,
        writer=csv.CsvWriter,
        why_unsupported=csv.why_unsupported,
    )


def _packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packed for packed in ("", ".gz", ".bz2", ".zst") for suffix in suffixes)


JSONL = Format(name="jsonl", suffixes=_packed(".jsonl", ".ndjson", ".json"), load=_load_jsonl)
CSV = Format(name="csv", suffixes=_packed(".csv", ".tsv"), load=_load_csv)
