"""Parses the values of --fields, --option and --writer-option."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.core.errors import OptionError


def parse_fields(text: str | None) -> dict[str, str] | None:
    """Parse "a,new=old" into {name in the sample: name in the file}; return None for None.

    Raises:
        OptionError: the text has another form.

    >>> parse_fields("image,label=y")
    {'image': 'image', 'label': 'y'}
    """
    if text is None:
        return None
    fields: dict[str, str] = {}
    for one in text.split(","):
        new, has_old, old = one.strip().partition("=")
        if not new or (has_old and not old) or new in fields:
            raise OptionError(f"--fields expects names, as in image,label or image=x,label=y, got {text!r}")
        fields[new] = old or new
    return fields


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse "name=value" pairs into options; values that are not JSON are text.

    Raises:
        OptionError: a pair has no value.

    >>> parse_options(["check=false", "size=[224, 224]", "delimiter=;"])
    {'check': False, 'size': [224, 224], 'delimiter': ';'}
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, has_value, value = pair.partition("=")
        if not name or not has_value:
            raise OptionError(f"expected an option as name=value, got {pair!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
