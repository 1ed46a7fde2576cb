"""Errors say where they come from, and nothing that a file holds can steer a terminal."""

from __future__ import annotations

import pickle

from penstock.core.errors import RecordError


def test_a_broken_record_is_told_without_the_control_characters_of_its_file() -> None:
    error = RecordError("größe.tar", 512, "a\x1b]0;title\x07\n", "it has no member 'x'\r")
    assert str(error) == r"größe.tar: record a\x1b]0;title\x07\n at byte 512: it has no member 'x'\r"
    again = pickle.loads(pickle.dumps(error))
    assert (again.key, again.offset, str(again)) == (error.key, 512, str(error))
