"""What writes a format: one file at a time, sample by sample."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.feed.sources.sample import Sample, Schema


class Writer(Protocol):
    """Writes samples of one schema to a new file. Used by one thread of one process.

    A format's module has it under the name `Writer`, and beside it

        unfit(schema) -> str              why samples of this schema would not come back as they were; "" if they would
        joined(parts, path) -> None       makes one file of several that its Writer made, in their order; a format
                                          without it is written to as many files as there are parts

    `close` makes the file complete; without it, after an error, the file may be anything, and is thrown away.
    """

    def __init__(self, path: str, schema: Schema, **options: Any) -> None:
        """Begin the file."""

    def write(self, sample: Sample) -> None:
        """Add a sample.

        Raises:
            SourceError: it does not fit the schema.
        """

    def close(self) -> None:
        """Finish the file."""
