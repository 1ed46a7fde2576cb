"""The values that stand for nulls (`null=`), in the types of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.errors import OptionError, SourceError
from penstock.data.schema import Field, Schema, field_of, plain


def null_values(null: Mapping[str, Any], fields: Schema) -> dict[str, Any]:
    """Return the value of each field's nulls, of the field's own type; of objects, as it is.

    Raises:
        OptionError: a field's type does not hold it: a batch with nulls would be of another type than one without.

    >>> null_values({"x": -1}, {"x": Field("number", "int32")})
    {'x': np.int32(-1)}
    """
    return {
        name: value if name not in fields or fields[name].kind == "object" else _typed(name, fields[name], value)
        for name, value in null.items()
    }


def _typed(name: str, field: Field, given: Any) -> Any:
    try:
        value = plain(given)
        found = field_of(value)
        is_alike = found.kind == field.kind and len(found.shape) == len(field.shape)
        is_of_size = all(size in (None, own) for size, own in zip(field.shape, found.shape, strict=is_alike))
        if is_alike and is_of_size:
            return value if field.kind in ("text", "bytes") else _cast(value, field.dtype)
        why = f"it is {found.words()}"
    except (SourceError, ValueError) as error:
        why = str(error)
    raise OptionError(
        f"null={{{name!r}: {str(given)[:80]}}} does not fit the field, which is {field.words()}: {why}; pass a value "
        f"that it holds, or have None and map it: objects=[{name!r}]"
    )


def _cast(value: Any, dtype: str) -> Any:
    given = np.asarray(value)
    with np.errstate(all="ignore"):
        made = given.astype(dtype)
    # Fractions are rounded to a float's digits; integers and bools have to be the same.
    if not (np.isfinite(made) == np.isfinite(given) if made.dtype.kind == "f" else made == given).all():
        raise ValueError(f"{dtype} does not hold it")
    return made[()]
