"""JSON lines and CSV: two formats in one folder, as both are read from lines of text that may be gzipped."""

from __future__ import annotations

from penstock.data.format import Format, Implementation


def _load_jsonl() -> Implementation:
    from penstock.data.formats.text import jsonl

    return Implementation(
        open_files=jsonl.open_files,
        writer=jsonl.JsonLinesWriter,
        concat_files=jsonl.concat_files,
        why_unsupported=jsonl.why_unsupported,
    )


def _load_csv() -> Implementation:
    from penstock.data.formats.text import csv

    return Implementation(
        open_files=csv.open_files,
        writer=csv.CsvWriter,
        concat_files=csv.concat_files,
        why_unsupported=csv.why_unsupported,
    )


JSONL = Format(name="jsonl", suffixes=(".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), load=_load_jsonl)
CSV = Format(name="csv", suffixes=(".csv", ".tsv", ".csv.gz", ".tsv.gz"), load=_load_csv)
