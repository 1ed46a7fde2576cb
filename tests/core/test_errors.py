"""Errors name their file and record, and no content of a file can control a terminal."""

from __future__ import annotations

import pickle

from penstock.core.errors import RecordError


def test_the_error_of_a_broken_record_escapes_control_characters() -> None:
    error = RecordError("größe.tar", 512, "a\x1b]0;title\x07\n", "it has no member 'x'\r")
    assert str(error) == r"größe.tar: record a\x1b]0;title\x07\n at byte 512: it has no member 'x'\r"
    again = pickle.loads(pickle.dumps(error))
    assert (again.key, again.offset, str(again)) == (error.key, 512, str(error))
