"""Reading JSON that somebody else wrote, and checking the values in it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from rlhf.errors import InputError, why


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises `InputError` otherwise."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({why(error)})") from error
    if not isinstance(document, dict):
        raise InputError(f"{path}: must hold a JSON object, found {type(document).__name__}")
    return document


def is_number(value: Any) -> bool:
    """Say whether a value is a finite number that fits a float; true and false are none.

    >>> [is_number(value) for value in (1, 0.5, True, "1", float("nan"), 10**400)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def finite_json(document: Any) -> Any:
    """Return a document with null in the place of every NaN and infinity, which JSON does not have.

    >>> finite_json({"a": [1, float("inf")], "b": "nan"})
    {'a': [1, None], 'b': 'nan'}
    """
    if isinstance(document, dict):
        return {key: finite_json(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [finite_json(value) for value in document]
    return finite_or_none(document) if isinstance(document, float) else document


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: NaN and infinities become null.

    >>> finite_or_none(0.5), finite_or_none(float("nan"))
    (0.5, None)
    """
    return float(value) if math.isfinite(value) else None
